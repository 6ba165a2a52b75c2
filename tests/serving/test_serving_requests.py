"""Cancellation, limits, steps and metrics."""

import asyncio
import contextlib
import threading
import time

import httpx2
import openai
import pytest
from support import http, tiny
from support.cases import paired
from support.serving import keys, serving, wait_for
from support.speaking import chat_tokenizer

from token_recycling.serving.access import LimitMiddleware
from token_recycling.serving.engine import Engine, Job
from token_recycling.serving.errors import ApiError
from token_recycling.serving.metrics import Metrics

LONG = {"prompt": "for index in", "max_tokens": 3500, "temperature": 0}


@pytest.fixture(scope="module")
def slow_server(slow):
    with serving(slow, tiny.tokenizer()) as running:
        yield running


# Cancellation


def cancelled_generations(server):
    return server.metrics().get('token_recycling_generations_total{outcome="cancelled"}', 0)


def generated_tokens(server):
    return server.metrics()["token_recycling_generated_tokens_total"]


@pytest.mark.parametrize(("path", "stream"), paired(["/v1/completions", "/v1/token_recycling/steps"], [False, True]))
def test_disconnect_cancels_a_generation(slow_server, path, stream):
    before, cancelled = generated_tokens(slow_server), cancelled_generations(slow_server)
    with contextlib.suppress(httpx2.ReadTimeout):
        asked, patience = {**LONG, "stream": stream}, 60 if stream else 0.6
        with http.stream("POST", f"{slow_server.url}{path}", json=asked, timeout=patience) as answer:
            for _ in zip(range(16), answer.iter_lines(), strict=False):
                pass
    slow_server.wait_until_idle()
    assert cancelled_generations(slow_server) == cancelled + 1
    assert 3 * stream <= generated_tokens(slow_server) - before < 3000


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_a_queued_request(slow, stream):
    with serving(slow, tiny.tokenizer(), concurrency=1) as server:
        with server.complete(**LONG, stream=True) as running:
            next(iter(running))
            with pytest.raises(Exception, match="timed out"):
                list(server.complete(timeout=0.2, stream=stream, n=2))
            wait_for(lambda: server.engine.running == 1)
            wait_for(lambda: server.engine.workers.waiting == 0 and len(server.server.server_state.tasks) == 1)
        server.wait_until_idle()
        assert cancelled_generations(server) == 2
        assert server.complete().usage.completion_tokens == 8


# Limits


def error_of(server, key="none", **more):
    with pytest.raises(openai.APIStatusError) as caught:
        server.complete(key, **more)
    return caught.value


def test_requests_beyond_the_limits_get_429(slow):
    settings = {"keys": keys("a", "b"), "isolation": "per-key", "max_requests": 2, "max_requests_per_key": 1}
    with serving(slow, tiny.tokenizer(), **settings) as server:
        a, b = "secret-a", "secret-b"
        with server.complete(a, max_tokens=3500, stream=True) as first:
            next(iter(first))
            of_key = error_of(server, a)
            assert (of_key.status_code, of_key.code) == (429, "too_many_requests")
            assert int(of_key.response.headers["retry-after"]) > 0
            with server.complete(b, max_tokens=3500, stream=True):
                assert error_of(server, b).status_code == 429
        server.wait_until_idle()
        assert server.complete(a).usage.completion_tokens == 8


def test_full_or_closing_server_answers_503(slow, monkeypatch):
    with serving(slow, tiny.tokenizer(), max_requests=1) as server:
        made = []
        monkeypatch.setattr(server.engine.pool, "make", made.append)
        with server.complete(max_tokens=3500, stream=True) as first:
            next(iter(first))
            error = error_of(server)
            assert (error.status_code, error.code) == (503, "overloaded")
            assert int(error.response.headers["retry-after"]) > 0
            for drafter in ("untrained", "suffix"):
                asked = {"prompt": "a", "drafter": drafter}
                assert server.post("/v1/token_recycling/steps", asked).status_code == 503
            assert not made, "a refused request costs no drafter"
        server.wait_until_idle()
        server.engine.closing = True
        assert error_of(server).code == "shutting_down"
        assert http.get(f"{server.url}/health").status_code == 503


def test_prompt_output_and_body_lengths_are_limited(model):
    with serving(model, tiny.tokenizer(), max_prompt_tokens=10, max_new_tokens=5, max_body=0.001) as server:
        error = error_of(server, prompt="import os\n" * 10)
        assert (error.status_code, error.code) == (400, "context_length_exceeded")
        assert server.complete(prompt="import").usage.completion_tokens == 5
        error = error_of(server, prompt="x" * 1000)
        assert (error.status_code, error.code) == (413, "request_too_large")
        for size, status in ((1000, 200), (1001, 413), (9000, 413)):
            whole = b'{"prompt": "import", "max_tokens": 1}'.ljust(size)
            for content in (whole, iter([whole[:50], whole[50:900], whole[900:]])):  # pieces are sent without a length
                how = {"content": content, "headers": {"Content-Type": "application/json"}, "timeout": 5}
                assert http.post(f"{server.url}/v1/completions", **how).status_code == status


def test_body_limit_counts_all_pieces():
    """Of which the HTTP server may deliver several at once."""
    pieces = [{"type": "http.request", "body": b"x" * 600, "more_body": more} for more in (False, True)]

    async def read(scope, receive, send):
        while (await receive())["more_body"]:
            pass

    async def receive():
        return pieces.pop()

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(ApiError, match="1,000 bytes"):
        asyncio.run(LimitMiddleware(read, 1000, Metrics())(scope, receive, None))


def test_prompts_are_tokenized_outside_the_event_loop(model, monkeypatch):
    """A long prompt would block streams of other requests."""
    tokenizer, threads = chat_tokenizer(), []
    usual = type(tokenizer)._encode_plus

    def encode(self, *args, **kwargs):
        threads.append(threading.current_thread().name)
        return usual(self, *args, **kwargs)

    with serving(model, tokenizer) as server:
        monkeypatch.setattr(type(tokenizer), "_encode_plus", encode)
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/token_recycling/steps"):
            body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
            assert server.post(path, {**body, "max_tokens": 1}).status_code == 200
    assert len(threads) == 3
    assert all(name.startswith("asyncio_") for name in threads)


def test_requests_time_out(slow):
    with serving(slow, tiny.tokenizer(), timeout=0.4) as server:
        error = error_of(server, max_tokens=3500)
        assert (error.status_code, error.code) == (504, "timeout")
        assert error.response.headers["x-should-retry"] == "false"
        with pytest.raises(openai.APIError, match=r"within 0\.4 s"):
            list(server.complete(max_tokens=3500, stream=True))
        assert server.steps(**LONG)[-1][0] == "error"
        assert server.metrics()['token_recycling_generations_total{outcome="failed"}'] == 3


def test_request_past_its_deadline_is_not_started():
    job = Job(new_drafter=lambda: None, timeout=0.01)
    time.sleep(0.02)
    with pytest.raises(ApiError, match=r"0\.01") as caught:
        Engine._run(None, job, None, 0, None, lambda deltas: None, wrap=None)
    assert (caught.value.status_code, caught.value.headers["Retry-After"]) == (503, "5")
    assert job.outcome is None


def test_cancelled_job_ends_with_its_running_output():
    """Its other output never begins."""
    ended = []
    job = Job(new_drafter=lambda: None, on_end=ended.append)
    job.outputs = [None, None]
    job.begin()
    job.cancel()
    assert not ended
    job.finish(True)
    assert ended == [job]


# Steps and metrics


def test_first_token_of_a_job_is_that_of_any_of_its_outputs():
    job = Job()
    job.count_first_token("a prompt", 3)
    first = job.first_token_seconds
    job.count_first_token("a prompt", 9)
    job.count_first_token("another", 2)
    assert (job.first_token_seconds, job.cached_tokens) == (first, 5)


def test_steps_join_to_the_output(server):
    """A letter that may begin a stop string is held back until the end."""
    whole = server.complete(max_tokens=40, temperature=0).choices[0].text
    asked = {"prompt": "for index in", "max_tokens": 40, "temperature": 0, "stop": [f"{whole[-1]}never said"]}
    for drafter in ("accelerated", "plain"):
        (start, *steps, end) = server.steps(**asked, drafter=drafter)
        assert (start[0], end[0], end[1]["text"]) == ("start", "end", whole[-1])
        assert "".join("".join(data["texts"]) for _, data in steps) + end[1]["text"] == whole
        assert [data["index"] for _, data in steps] == list(range(len(steps)))
        seconds = [data["seconds"] for _, data in steps]
        assert seconds == sorted(seconds), "they count from the end of the prefill"
        for _, data in steps:
            draft, path = data["draft"], data["path"]
            assert len(draft["parents"]) == len(draft["tokens"]) == len(draft["texts"])
            assert data["tokens"][: data["accepted"]] == [draft["tokens"][node] for node in path[1:]]
            assert [draft["parents"][node] for node in path] == [-1, *path[:-1]]
        assert end[1]["usage"]["speculation"]["steps"] == len(steps)
        assert (len(steps) == 40) == (drafter == "plain")


def test_metrics_equal_the_sum_of_usages(model):
    with serving(model, tiny.tokenizer()) as server:
        usages = [server.complete(max_tokens=15, temperature=0, n=2).usage for _ in range(3)]
        error_of(server, max_tokens=0)
        counted = server.metrics()
    said = [usage.model_extra["speculation"] for usage in usages]
    wanted = {name: sum(one[name] for one in said) for name in ("steps", "drafted_tokens", "accepted_tokens")}
    wanted |= {"generated_tokens": 90, "prompt_tokens": sum(usage.prompt_tokens for usage in usages)}
    wanted["cached_tokens"] = sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    wanted = {f"{name}_total": number for name, number in wanted.items()}
    wanted |= {
        'generations_total{outcome="complete"}': 3,
        'requests_total{path="/v1/completions",status="200"}': 3,
        'requests_total{path="/v1/completions",status="400"}': 1,
        "mean_accepted_tokens": pytest.approx(90 / wanted["steps_total"]),
        "drafters": 1,
        "requests_in_progress": 0,
    }
    assert {name: counted[f"token_recycling_{name}"] for name in wanted} == wanted
    for phase in ("wait", "prefill", "forward", "retrieve", "update matrix"):
        assert counted[f'token_recycling_seconds_total{{phase="{phase}"}}'] > 0


@pytest.mark.falls_back
def test_usage_states_why_a_request_is_not_accelerated(model, monkeypatch):
    with serving(model, tiny.tokenizer()) as server:
        why_not = "token_recycling.hf.call.GenerateCall.why_not"
        monkeypatch.setattr(why_not, lambda call, model: "expected better weather")
        said = server.complete().usage.model_extra["speculation"]
        assert not said["accelerated"]
        assert said["not_accelerated_because"] == "expected better weather"
        assert server.metrics()["token_recycling_not_accelerated_total"] == 1
