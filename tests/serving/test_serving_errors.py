"""What a request does wrong is said, with status 400; what fails in the server is in its log alone, with 500."""

import asyncio
import contextlib
import json

import httpx2
import pytest
from support import tiny
from support.serving import keys, matrix_path, serving
from support.speaking import chatty

from token_recycling.model.loading import Loaded
from token_recycling.serving.app import warm_up
from token_recycling.serving.service import Service
from token_recycling.serving.settings import Settings

MESSAGES = [{"role": "user", "content": "import os"}]
ASKED = {
    "/v1/completions": {"prompt": "import os"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "import os"},
    "/v1/token_recycling/steps": {"prompt": "import os"},
}
WAYS = [(path, stream) for path in ASKED for stream in (False, True) if not path.endswith("steps") or stream]


def ask(server, path, stream, key=None, **more):
    """The status and the text of an answer; that of a stream has begun with 200."""
    answer = server.post(path, {**ASKED[path], **({} if path.endswith("steps") else {"stream": stream}), **more}, key)
    assert answer.status_code == 200 or not stream
    server.wait_until_idle()
    return answer.status_code, answer.text


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, RuntimeError])
@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_what_fails_while_generating_is_in_the_log_alone(server, model, monkeypatch, caplog, path, stream, kind):
    def broken(*args, **kwargs):
        raise kind("zip() argument 2 is shorter")

    with monkeypatch.context() as patch:
        patch.setattr(model.lm_head, "forward", broken)
        status, text = ask(server, path, stream)
    assert stream or status == 500
    assert "internal server error" in text
    assert "zip" not in text
    (said,) = [record for record in caplog.records if record.name == "token_recycling.serving"]
    assert "zip() argument 2 is shorter" in str(said.exc_info)


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_a_damaged_matrix_of_a_key_is_the_servers_fault(model, tmp_path, caplog, path, stream):
    settings = {"keys": keys("a"), "isolation": "per-key", "matrix": matrix_path(tmp_path)}
    with serving(model, chatty(tiny.tokenizer()), **settings) as server:
        file = server.service.pool.file("a")
        file.parent.mkdir()
        file.write_bytes(b"cut off")
        status, text = ask(server, path, stream, "secret-a")
        assert stream or status == 500
        assert str(tmp_path) not in text
        assert "internal server error" in text
        assert "delete it to start anew" in caplog.text


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_what_transformers_refuses_is_said(server, caplog, path, stream):
    status, text = ask(server, path, stream, generation_config='{"typical_p": 0.0, "do_sample": true}')
    assert stream or status == 400
    assert "typical_p" in text
    assert not [record for record in caplog.records if record.name == "token_recycling.serving"]


@pytest.mark.parametrize("given", ['{"bad_words_ids": [[5], [300]]}', '{"sequence_bias": [[[5, 300], 1.5]]}'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_tokens_that_are_none_are_said(server, path, given):
    status, text = ask(server, path, False, generation_config=given)
    assert (status, "got 300" in text) == (400, True)
    shorter = given.replace("300", "299").replace("{", '{"max_new_tokens": 3, ')
    assert ask(server, path, False, generation_config=shorter)[0] == 200


@pytest.mark.parametrize("kind", [ValueError, TypeError, KeyError, RuntimeError])
@pytest.mark.parametrize("path", ASKED)
def test_what_fails_while_a_request_is_prepared_is_in_the_log_alone(server, monkeypatch, caplog, path, kind):
    def broken(*args, **kwargs):
        raise kind("the internals of /srv/model")

    with monkeypatch.context() as patch:
        patch.setattr("token_recycling.serving.sequences.config_of", broken)
        answer = server.post(path, ASKED[path])
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "internals" not in answer.text
    (said,) = [record for record in caplog.records if record.name == "token_recycling.serving"]
    assert "the internals of /srv/model" in str(said.exc_info)
    server.wait_until_idle()


def test_what_fails_in_transformers_without_the_requests_doing_is_an_internal_error(server, model, monkeypatch):
    def broken(*args, **kwargs):
        raise ValueError("the internals of generate")

    with monkeypatch.context() as patch:
        patch.setattr(model, "_get_logits_processor", broken)
        assert ask(server, "/v1/completions", False)[0] == 500


def test_an_error_in_a_stream_names_the_field(server):
    _, text = ask(server, "/v1/completions", True, generation_config='{"typical_p": 0.0, "do_sample": true}')
    assert json.loads(text.removeprefix("data: "))["error"]["param"] == "generation_config"


@pytest.mark.parametrize("path", ASKED)
def test_one_mistake_has_one_code_and_param_everywhere(model, path):
    with serving(model, chatty(tiny.tokenizer()), max_prompt_tokens=40) as server:
        field = next(iter(ASKED[path]))
        long = [{**MESSAGES[0], "content": "a" * 400}] if field == "messages" else "a" * 400
        error = server.post(path, {field: long}).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)
        for content in (b"{bad", b'{"prompt": "\xff"}', b"", b"[" * 100_000):
            answer = httpx2.post(f"{server.url}{path}", content=content, headers={"Content-Type": "application/json"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_body", None), content[:9]


def test_what_fails_at_start_is_said(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    service = Service(Loaded(model, tiny.tokenizer()), Settings())
    with (
        contextlib.closing(service),
        pytest.raises(RuntimeError, match=r"warm-up request failed: ValueError: .*num_beams"),
    ):
        asyncio.run(warm_up(service))


def test_what_a_template_refuses_is_said(server, monkeypatch):
    monkeypatch.setattr(server.service.loaded.tokenizer, "chat_template", "{{ raise_exception('must alternate') }}")
    status, text = ask(server, "/v1/chat/completions", False)
    assert (status, "must alternate" in text) == (400, True)


HALF, DEEP = chr(0xD800), json.loads("[" * 900 + "]" * 900)
GIVEN = [
    ('{"exponential_decay_length_penalty": [1, 1e300]}', "exponential_decay_length_penalty.1", "1e+300"),
    ('{"eos_token_id": 1%s}' % ("0" * 30), None, "1000000"),
    ('{"eos_token_id": []}', "eos_token_id", "[]"),
    ('{"bad_words_ids": "none"}', "bad_words_ids", '"none"'),
    ('{"sequence_bias": [[[5], 1e300]]}', "sequence_bias.0.1", "1e+300"),
    (json.dumps({"suppress_tokens": list(range(300))}), None, "all of them forbidden"),
    ('{"suppress_tokens": [999]}', None, "999"),
    ('{"temperature": 1e-40}', None, "1e-40"),
    ('{"top_k": NaN}', "top_k", "NaN"),
    ('{"num_beams": 4}', "num_beams", "not permitted"),
    ("[" * 9000, None, "JSON"),
]


@pytest.mark.parametrize(
    ("path", "more", "param", "said"),
    [
        ("/v1/completions", {"temperature": 1e-40}, "temperature", "got 1e-40; 0 is greedy"),
        ("/v1/responses", {"temperature": 1e-40}, "temperature", "1e-40"),
        ("/v1/completions", {"repetition_penalty": 1e-300, "temperature": 1}, "repetition_penalty", "1e-300"),
        ("/v1/completions", {"repetition_penalty": 1e30}, "repetition_penalty", "1e+30"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"x": DEEP}}, None, "recursion limit"),
        ("/v1/responses", {"chat_template_kwargs": {"x": DEEP}}, None, "recursion limit"),
        ("/v1/chat/completions", {"messages": [{**MESSAGES[0], "x": DEEP}]}, None, "recursion limit"),
        ("/v1/chat/completions", {"metadata": {"x": DEEP}}, None, "recursion limit"),
        ("/v1/completions", {"prompt": [-1, 2]}, "prompt.0", "-1"),
        ("/v1/completions", {"prompt": [[3], [2, -7]]}, "prompt.1.1", "-7"),
        ("/v1/completions", {"prompt": [1.5]}, "prompt.0", "1.5"),
        ("/v1/completions", {"prompt": [True]}, "prompt.0", "true"),
        ("/v1/completions", {"prompt": f"a{HALF}"}, None, "hex escape"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}, None, "hex escape"),
        ("/v1/responses", {"input": HALF}, None, "hex escape"),
        ("/v1/token_recycling/steps", {"prompt": HALF}, None, "hex escape"),
        ("/v1/completions", {HALF: 1}, None, "hex escape"),
        ("/v1/completions", {"temperature": float("nan")}, None, "expected value"),
        ("/v1/completions", {"top_p": "x"}, "top_p", '"x"'),
        ("/v1/completions", {"speculation": 1}, "speculation", "got 1"),
        ("/v1/completions", {"n": 0}, "n", "got 0"),
        ("/v1/completions", {"logit_bias": {"a": 1}}, "logit_bias.a", '"a"'),
        ("/v1/completions", {"logit_bias": {"1" * 5000: 1}}, f"logit_bias.{'1' * 40}", '"111'),
        ("/v1/completions", {"logit_bias": {"1": "x"}}, "logit_bias.1", '"x"'),
        ("/v1/completions", {"min_tokens": 10**30}, "min_tokens", str(10**30)),
        ("/v1/completions", {"guided_json": "[" * 9000}, "guided_json", "recursion limit"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "got messages"),
        (
            "/v1/completions",
            {"response_format": {"type": "json_schema", "json_schema": [1]}},
            "response_format.json_schema",
            "[1]",
        ),
        (
            "/v1/completions",
            {"response_format": {"type": "json_object"}, "generation_config": '{"no_repeat_ngram_size": 1}'},
            "generation_config",
            "no_repeat_ngram_size",
        ),
        *(
            (
                "/v1/completions",
                {"generation_config": given},
                ".".join(filter(None, ("generation_config", field))),
                said,
            )
            for given, field, said in GIVEN
        ),
    ],
    ids=lambda value: None if isinstance(value, (str, dict)) else value,
)
def test_a_field_that_cannot_be_is_refused_by_name(server, path, more, param, said):
    """Where the body itself cannot be read, no field is named."""
    body = json.dumps({**ASKED[path], **more})
    answer = httpx2.post(f"{server.url}{path}", content=body, headers={"Content-Type": "application/json"}, timeout=30)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["param"], error["code"]) == (param, "invalid_value" if param else "invalid_body")
    assert said in error["message"]
    assert len(error["message"]) < 500
    server.wait_until_idle()


def test_a_number_beyond_all_is_no_json(server):
    """Python reads 1e999 as infinity, which it writes as what is no JSON."""
    body = b'{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": 1e999}}'
    answer = httpx2.post(
        f"{server.url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")


def test_arguments_of_calls_that_no_template_can_write(server):
    call = {"function": {"name": "f", "arguments": json.dumps({"x": DEEP})}}
    messages = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]
    answer = server.post("/v1/chat/completions", {"messages": messages})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages.1.tool_calls.0.function.arguments")
    assert "recursion limit" in error["message"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"prompt": "a"}', None),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded"),
        (b'["a"]', "application/json"),
        (b'{"prompt"', "application/json"),
        (b'{"prompt": "\xff"}', "application/json"),
        (b"[" * 100_000, "application/json"),
        (b"", "application/json"),
    ],
)
def test_a_body_that_is_no_json_is_said_to_be_none(server, content, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    answer = httpx2.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_body")
