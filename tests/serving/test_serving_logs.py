"""Server logs: one JSON line for every answer and generation, without any prompt or output text."""

import json
import logging

import pytest
from support import http, tiny
from support.serving import keys, serving, wait_for
from support.speaking import ascii_llama

from token_recycling.serving.metrics import JsonLines, log_json_lines

SECRET = "a secret that is in no log"


@pytest.fixture
def access_log(caplog):
    with caplog.at_level(logging.INFO, "token_recycling.serving.access"):
        yield caplog


def test_answers_and_generations_are_logged_without_texts(access_log):
    with serving(ascii_llama(), tiny.tokenizer(), keys=keys("ann", "bob")) as server:
        said = server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 12}, "secret-ann").json()
        assert server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 0}, "secret-bob").status_code == 400
        server.wait_until_idle()
    lines = [json.loads(JsonLines().format(record)) for record in access_log.records if "access" in record.name]
    (generation,) = [line for line in lines if line["event"] == "generation"]
    assert generation["key"] == "ann"
    assert generation["outcome"] == "complete"
    usage = said["usage"]
    assert generation["tokens"] == 12 == usage["completion_tokens"]
    assert generation["prompt_tokens"] == usage["prompt_tokens"]
    assert generation["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
    assert generation["mat"] == pytest.approx(usage["speculation"]["mat"], abs=0.01)
    assert generation["accelerated"] is usage["speculation"]["accelerated"] is True
    assert [line["status"] for line in lines if line["event"] == "answer"] == [200, 400]
    logged = json.dumps(lines)
    for word in ("secret", said["choices"][0]["text"][:6]):
        assert word not in logged


def test_latencies_are_counted_by_key_and_cover_the_whole_stream(access_log):
    with serving(ascii_llama(), tiny.tokenizer(), keys=keys("ann", "bob", "metrics")) as server:
        for user in ("ann", "ann", "bob"):
            asked = {"prompt": "for index in", "max_tokens": 200, "stream": True}
            server.post("/v1/completions", asked, f"secret-{user}")
        server.wait_until_idle()
        wait_for(lambda: [record.getMessage() for record in access_log.records].count("answer") == 3)
        metrics = server.metrics("secret-metrics")
    latencies = ("request_latency_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds")
    for name in ("generation_mat", "step_seconds", *latencies):
        for user, count in (("ann", 2), ("bob", 1)):
            assert metrics[f'token_recycling_{name}_count{{key="{user}"}}'] == count
    latency, first, token = (metrics[f'token_recycling_{name}_sum{{key="bob"}}'] for name in latencies)
    assert 0 < first < latency
    events = [record for record in access_log.records if record.fields.get("path") != "/metrics"]
    generated, answered = (record.fields for record in events[-2:])
    later_tokens = 199  # after the first pass, which verifies no draft when an answer is streamed
    assert token == pytest.approx(generated["decode_seconds"] / later_tokens, rel=0.01)
    assert metrics['token_recycling_step_seconds_sum{key="bob"}'] == pytest.approx(
        generated["decode_seconds"] / generated["steps"], rel=0.01
    )
    assert answered["seconds"] >= generated["prefill_seconds"] + generated["decode_seconds"]


def test_json_lines_are_single_objects_with_tracebacks(capfd):
    changed = ("token_recycling", "transformers", "token_recycling.serving.access", "")
    own, *others = map(logging.getLogger, changed)
    before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in (own, *others)]
    try:
        log_json_lines()
        try:
            raise ValueError("something\nin two lines")
        except ValueError:
            own.exception("it failed")
        logging.getLogger("somebody.else").warning("of somebody else")
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
    first, second = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert first["time"].endswith("+00:00"), "collectors need the time zone"
    assert (first["level"], first["event"]) == ("error", "it failed")
    assert "in two lines" in first["trace"]
    assert second["logger"] == "somebody.else"


def test_unknown_paths_are_logged_as_other(access_log):
    with serving(ascii_llama(), tiny.tokenizer()) as server:
        http.get(f"{server.url}/{SECRET.replace(' ', '-')}")
    assert [record.fields["path"] for record in access_log.records if record.name.endswith("access")] == ["other"]
