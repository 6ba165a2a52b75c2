"""Concurrent requests: each answer equals that of a single request, and each request ends independently."""

import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from support import architectures, tiny
from support.openai_answers import completion, streamed_completion
from support.serving import matrix_path, serving, wait_for
from support.speaking import chat_tokenizer

import token_recycling as tr
from token_recycling.model.graphs.passes import CapturedPasses
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.serving import create_app
from token_recycling.serving.drafter_pool import DrafterPool
from token_recycling.serving.engine import WorkerPool
from token_recycling.serving.generation import AdditivePenalties


@pytest.fixture(scope="module")
def server(model):
    with serving(model, chat_tokenizer(), concurrency=4) as running:
        yield running


def run_concurrently(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(lambda call: call(), calls))


ASKED = {"prompt": "for index in", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def endings(server, tokenizer):
    """Requests that end by length, by a stop string, by a stop id, and by a stop id exactly at the token limit."""
    (_, *steps, _) = server.steps(**ASKED)
    tokens = [token for _, data in steps for token in data["tokens"]]
    last = next(place for place in range(4, 24) if tokens[place] not in tokens[:place])
    by_id = {**ASKED, "stop_token_ids": [tokens[last]]}
    return ASKED, {**ASKED, "stop": [tokenizer.decode(tokens)[6:9], "never"]}, by_id, {**by_id, "max_tokens": last + 1}


def answers(server, bodies):
    """Return text, finish reason, usage and scores of each request; completion, stream and steps must agree."""
    found = []
    for body in bodies:
        answer, parts = completion(server, **body, logprobs=0), streamed_completion(server, **body)
        (_, *steps, (name, end)) = server.steps(**body)
        (choice,), usage = answer.choices, answer.usage.model_dump()
        assert all(len(data["texts"]) == len(data["tokens"]) for _, data in steps)
        shown = "".join("".join(data["texts"]) for _, data in steps) + end["text"]
        assert (name, shown, end["finish_reason"]) == ("end", choice.text, choice.finish_reason)
        assert "".join(part.choices[0].text for part in parts) == choice.text
        assert parts[-1].choices[0].finish_reason == choice.finish_reason
        counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        assert counts == {name: end["usage"][name] for name in counts}
        scores = pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)
        found.append((choice.text, choice.finish_reason, counts, scores))
    return found


def sampled_texts(server):
    body = {"prompt": ["for index in", "import os"], "temperature": 1.2, "seed": 7, "n": 2, "max_tokens": 12}
    return [choice.text for choice in completion(server, **body).choices]


@pytest.mark.falls_back
def test_answers_are_equal_batched_alone_and_by_transformers(server, model, tokenizer, endings, monkeypatch):
    """transformers' own loop calls streamers before stopping criteria."""
    together, texts = answers(server, endings), sampled_texts(server)
    assert [reason for _, reason, *_ in together] == ["length", "stop", "stop", "stop"]
    assert len({*texts}) == 4
    wanted = [(*said, scores.expected) for *said, scores in together]
    with serving(model, tokenizer, concurrency=1) as alone:
        assert answers(alone, endings) == wanted
        assert [sampled_texts(alone), sampled_texts(alone)] == [texts] * 2
        why_not = "token_recycling.hf.call.GenerateCall.why_not"
        monkeypatch.setattr(why_not, lambda call, model: "expected better weather")
        assert answers(alone, endings) == wanted


def test_disconnects_and_failures_do_not_affect_other_requests(slow, monkeypatch):
    """One client disconnects, one request fails before all its outputs begin; the third answer is not affected."""

    def failing(processor, ids, scores):
        if ids.shape[1] < 30:
            return scores
        raise RuntimeError("no more")

    monkeypatch.setattr(AdditivePenalties, "__call__", failing)
    tokenizer = tiny.tokenizer()
    ids = tokenizer("import os\n", return_tensors="pt").input_ids
    said = slow.generate(ids, max_new_tokens=150, do_sample=False, pad_token_id=0)
    wanted = tokenizer.decode(said[0, ids.shape[1] :])
    with serving(slow, tokenizer, concurrency=4, timeout=60) as server:

        def leaves():
            with server.complete(max_tokens=3500, temperature=0, stream=True) as stream:
                next(iter(stream))

        def fails():
            with pytest.raises(openai.InternalServerError):
                server.complete(max_tokens=3500, temperature=0, presence_penalty=1, n=8)

        *_, text = run_concurrently(
            leaves, fails, lambda: server.complete(prompt="import os\n", max_tokens=150, temperature=0).choices[0].text
        )
        assert text == wanted
        server.wait_until_idle()
        counted = server.metrics()
    for outcome in ("cancelled", "failed", "complete"):
        assert counted[f'token_recycling_generations_total{{outcome="{outcome}"}}'] == 1


def test_batch_failure_fails_running_requests_but_not_the_next(model, monkeypatch):
    with serving(model, tiny.tokenizer(), concurrency=2) as server:
        target = server.engine.batch.target

        def failing(*args, **kwargs):
            raise RuntimeError("no memory")

        def refused():
            with pytest.raises(openai.InternalServerError, match="internal server error"):
                server.complete()

        with monkeypatch.context() as patch:
            patch.setattr(target, "forward", failing)
            run_concurrently(refused, refused)
        assert server.complete().usage.completion_tokens == 8


def test_metrics_count_running_and_waiting_sequences(slow):
    with serving(slow, tiny.tokenizer(), concurrency=2) as server:
        long = {"max_tokens": 3500, "temperature": 0, "stream": True}
        with server.complete(**long) as first, server.complete(**long) as second:
            next(iter(first))
            next(iter(second))
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(server.complete)
                wait_for(lambda: server.metrics()["token_recycling_sequences_waiting"] == 1)
                assert server.metrics()["token_recycling_sequences_running"] == 2
                first.close()
                assert waiting.result().usage.completion_tokens == 8
        server.wait_until_idle()
        assert server.metrics()["token_recycling_sequences_running"] == 0


def test_worker_pool_alternates_keys_and_skips_cancelled_tasks():
    worker, order, held = WorkerPool(1), [], threading.Event()
    worker.submit(held.wait)
    wait_for(lambda: worker.running)
    asked = [*(("a", n) for n in range(4)), ("b", 0)]
    tasks = [worker.submit(order.append, key + str(n), key=key) for key, n in asked]
    assert worker.waiting == 5
    assert tasks.pop(1).cancel()
    assert worker.waiting == 4
    held.set()
    for task in tasks:
        task.result(5)
    assert order == ["a0", "b0", "a2", "a3"]
    with pytest.raises(ZeroDivisionError):
        worker.submit(lambda: 1 // 0).result(5)


def test_matrix_is_written_outside_the_decoding_thread(model, tmp_path, monkeypatch):
    """The decoding thread copies a matrix, another thread writes it."""
    threads, copied = set(), set()
    save, copies = NgramMatrix.save, DrafterPool._copied

    def saving(*args):
        threads.add(threading.current_thread().name)
        save(*args)

    def copying(*args):
        copied.add(threading.current_thread().name)
        return copies(*args)

    monkeypatch.setattr(NgramMatrix, "save", saving)
    monkeypatch.setattr(DrafterPool, "_copied", copying)
    settings = {"matrix": matrix_path(tmp_path), "save_every": 0.05, "concurrency": 2}
    with serving(model, tiny.tokenizer(), **settings) as server:
        server.complete(max_tokens=60)
        wait_for(lambda: threads)
        assert (copied, "decoding" in threads) == ({"decoding"}, False)


def test_concurrency_is_refused_for_models_without_batching():
    model = architectures.model_of(architectures.named("llama", "dynamic rotary scaling from 32"))
    with pytest.raises(tr.UnsupportedModelError, match="one sequence"):
        create_app(model, tiny.tokenizer(), concurrency=2)
    with pytest.raises(ValueError, match=r"concurrency .*got 0"):
        create_app(model, tiny.tokenizer(), concurrency=0)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_fast_server_uses_captured_passes(model, tokenizer, server, monkeypatch, concurrency):
    """For every kind of request; models that do not support them are refused."""
    captured, forward = [], CapturedPasses.forward
    monkeypatch.setattr(CapturedPasses, "forward", lambda *arguments: captured.append(1) or forward(*arguments))
    asked = [{"prompt": "for index in"}, {"prompt": "import os\nimport", "logit_bias": {"5": -100}}]
    with serving(model, tokenizer, fast="on", concurrency=concurrency) as fast:
        for one in asked:
            captured.clear()
            found = fast.complete(**one, temperature=0, max_tokens=12).choices[0].text
            assert found == server.complete(**one, temperature=0, max_tokens=12).choices[0].text
            assert captured
    with pytest.raises(tr.NoFastPathError):
        create_app(architectures.model_of(architectures.named("bloom")), tokenizer, fast="on")
