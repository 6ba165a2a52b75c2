"""Client errors have status 400 and a precise message; server errors have status 500 and details only in the log."""

import asyncio
import contextlib
import json

import pytest
from support import http, tiny
from support.functions import HELD
from support.serving import serving
from support.speaking import CONTEXT, ascii_llama, chat_tokenizer, ending_llama
from transformers import PreTrainedTokenizerBase

from token_recycling.model.loading import Loaded
from token_recycling.serving.engine import Engine
from token_recycling.serving.settings import Settings

MESSAGES = [{"role": "user", "content": "import os"}]
C, H, R, A, S = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/token_recycling/steps"
ASKED = {
    C: {"prompt": "import os"},
    H: {"messages": MESSAGES},
    R: {"input": "import os"},
    A: {"messages": MESSAGES, "max_tokens": 8},
    S: {"prompt": "import os"},
}
ERRORS = {C: ValueError, H: TypeError, R: KeyError, A: RuntimeError, S: ValueError}
REQUESTS = [(path, stream) for path in ASKED for stream in (False, True) if path != S or stream]


@pytest.fixture(scope="module")
def model():
    return ending_llama()


@pytest.fixture(scope="module")
def server(model):
    with serving(model, chat_tokenizer()) as running:
        yield running


def ask(server, path, **more):
    """Return status and text of an answer."""
    answer = server.post(path, {**ASKED[path], **more})
    server.wait_until_idle()
    return answer.status_code, answer.text


def post_raw(server, path, content, **headers):
    return http.post(f"{server.url}{path}", content=content, headers=headers, timeout=300)


# Server errors


@pytest.mark.parametrize(
    "seam", ["token_recycling.model.target.Target.forward", "token_recycling.serving.api.common.config_of"]
)
@pytest.mark.parametrize(("path", "stream"), REQUESTS)
def test_server_errors_are_detailed_only_in_the_log(server, monkeypatch, caplog, path, stream, seam):
    """While a request is prepared, and while its output is generated."""

    def broken(*args, **kwargs):
        raise ERRORS[path]("zip() argument 2 of /srv/model")

    with monkeypatch.context() as patch:
        patch.setattr(seam, broken)
        answer = server.post(path, {**ASKED[path], "stream": stream})
    assert answer.status_code == (200 if stream and "forward" in seam else 500)
    assert "internal_error" in answer.text
    assert "zip" not in answer.text
    (logged,) = [record for record in caplog.records if record.name == "token_recycling.serving"]
    assert "zip() argument 2 of /srv/model" in str(logged.exc_info)
    server.wait_until_idle()


def test_unsupported_generation_config_fails_the_warm_up(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    engine = Engine(Loaded(model, tiny.tokenizer()), Settings())
    with contextlib.closing(engine), pytest.raises(RuntimeError, match="num_beams"):
        asyncio.run(engine.warm_up())


# Client errors


@pytest.mark.parametrize("path", ASKED)
def test_error_code_and_param_are_the_same_on_every_path(server, path):
    field = next(iter(ASKED[path]))
    long = [{**MESSAGES[0], "content": "a" * (CONTEXT + 1)}] if field == "messages" else "a" * (CONTEXT + 1)
    error = server.post(path, {**ASKED[path], field: long}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    # litellm and langchain recognize context-length errors by these words.
    for words in ("prompt is too long", "model's maximum context length is", "shorten"):
        assert words in error["message"]
    kind = {"Content-Type": "application/json"}
    contents = (b"{bad", b'{"prompt": "\xff"}', b"", b"[" * 100_000, b'["a"]', b'{"chat_template_kwargs": 1e999}')
    for content, headers in [*((content, kind) for content in contents), (b'{"prompt": "a"}', {})]:
        answer = post_raw(server, path, content, **headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_body", None), content[:9]


def test_template_errors_are_reported(server, monkeypatch):
    monkeypatch.setattr(server.engine.loaded.tokenizer, "chat_template", "{{ raise_exception('must alternate') }}")
    status, text = ask(server, H)
    assert (status, "must alternate" in text) == (400, True)


def with_schema(schema, strict=False):
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
    }


def with_calls(*calls):
    return {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [*calls]}]}


GO = {"id": "c", "type": "function", "function": {"name": "go", "arguments": "{}"}}
HALF, DEEP = chr(0xD800), json.loads("[" * 900 + "]" * 900)
CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
CALL = {"type": "tool_use", "id": "t", "name": "a", "input": {}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}
CITED = {"type": "document", "source": {"type": "text", "data": "a"}, "citations": {"enabled": True}}
FORMAT = {"type": "json_schema", "name": "a"}
STRICT = {"name": "a", "strict": True, "parameters": {"properties": {"a": {"uniqueItems": True}}}}
SO, CHOSEN = "structured_outputs", "tool_choice.allowed_tools.tools"
ALLOWED = {"type": "allowed_tools", "tools": [{"name": "fly"}]}
REFUSED = [
    # Prompts
    (C, {"prompt": None}, "prompt", ""),
    (C, {"prompt": []}, "prompt", "[]"),
    (C, {"prompt": ["a", ""]}, "prompt", "got 0"),
    (C, {"prompt": [5, 300]}, "prompt", "got 300"),
    (C, {"prompt": [5, 2**70]}, "prompt", "got 1180591620717411303424"),
    (C, {"prompt": [[3], [2, -7]]}, "prompt.1.1", "-7"),
    (C, {"prompt": [True]}, "prompt.0", "true"),
    (H, {"messages": []}, "messages", "[]"),
    (H, {"messages": [{"role": "bot", "content": "a"}]}, "messages.0.role", "'assistant' or 'tool', got \"bot\""),
    (H, {"messages": [{"role": "User", "content": "a"}]}, "messages.0.role", 'got "User"'),
    (R, {"input": [{"role": "tool", "content": "a"}]}, "input.0.role", 'got "tool"'),
    (A, {"messages": [{"role": "developer", "content": "a"}]}, "messages.0.role", 'got "developer"'),
    (H, {"messages": [{"role": "user", "content": [PICTURE]}]}, "messages.0.content.0", "image_url"),
    (R, {"input": []}, "input", "[]"),
    (R, {"input": [{"type": "zzz"}]}, "input", 'function_call_output, additional_tools, got [{"type": "zzz"}]'),
    (R, {"input": [{"type": "zzz"}, {"content": 3}]}, "input.1.content", "must be a string or a list, got 3"),
    (R, {"input": [{"type": 3}]}, "input.0", "type must be a string, got 3"),
    (
        C,
        {"prompt": 3},
        "prompt",
        "must be a string, a list of strings, token ids or a list of lists of token ids, got 3",
    ),
    (C, {"prompt": [5, "a"]}, "prompt.1", 'must be an integer, got "a"'),
    (R, {"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
    (R, {"input": [{"type": "compaction", "encrypted_content": "x"}, {"content": "a"}]}, "input", "compaction"),
    (R, {"input": [{"type": "additional_tools"}, {"content": "a"}]}, "input.0", "tools is missing"),
    (A, {"messages": []}, "messages", "[]"),
    (A, {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0", "id"),
    (A, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0", "image"),
    (A, {"messages": [{"role": "user", "content": [CITED]}]}, "messages.0.content.0", "citations"),
    (A, {"thread": {"type": "create"}}, "thread", "send all messages"),
    (A, {"compaction": {"type": "summarize"}}, "compaction", "summary"),
    (A, {"max_tokens": None}, "max_tokens", ""),
    (S, {"messages": MESSAGES}, "prompt", "messages"),
    # Invalid or too deeply nested JSON
    (H, {"messages": [{"role": "user", "content": HALF}]}, None, ""),
    (C, {HALF: 1}, None, ""),
    (C, {"temperature": float("nan")}, None, ""),
    (H, {"metadata": {"x": DEEP}}, None, ""),
    # Sampling
    (C, {"temperature": "hot"}, "temperature", 'must be a number, got "hot"'),
    (C, {"stop": 3}, "stop", "must be a string or a list, got 3"),
    (C, {"stop": ["a", 3]}, "stop.1", "must be a string, got 3"),
    (A, {"stop_sequences": {}}, "stop_sequences", "must be a string or a list, got {}"),
    (C, {"stop": "a" * 129}, "stop", "at most 128 characters"),
    (R, {"temperature": 1e-40}, "temperature", "1e-40"),
    (A, {"temperature": -1}, "temperature", "-1"),
    (C, {"repetition_penalty": 1e-300, "temperature": 1}, "repetition_penalty", "1e-300"),
    (C, {"top_p": -0.1}, "top_p", "-0.1"),
    (C, {"speculation": 1}, "speculation", "1"),
    (C, {"logit_bias": {"5": 101}}, "logit_bias.5", "101"),
    (C, {"logit_bias": {"300": 1}}, "logit_bias", "300"),
    (C, {"logit_bias": {"1" * 5000: 1}}, f"logit_bias.{'1' * 40}", '"111'),
    (C, {"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias", "1024"),
    (C, {"logprobs": 6}, "logprobs", "6"),
    (H, {"top_logprobs": 2}, "top_logprobs", "logprobs"),
    (R, {"include": ["message.output_text.logprobs"]}, "include", "logprobs of /v1/chat/completions"),
    # Counts and limits
    (C, {"n": 0}, "n", "0"),
    (C, {"n": 129}, "n", "128"),
    (R, {"background": True}, "background", "omit it"),
    (C, {"prompt": ["a", "b"], "n": 65}, "n", "2 prompts x 65"),
    (C, {"min_tokens": 10**30}, "min_tokens", str(10**30)),
    (C, {"min_tokens": 9, "max_tokens": 8}, "min_tokens", "9"),
    (C, {"stop_token_ids": [10**6]}, "stop_token_ids", "1000000"),
    (C, {"max_tokens": 5.5}, "max_tokens", "5.5"),
    (C, {"max_tokens": 0}, "max_tokens", "echo"),
    (C, {"stop": ["x"] * 65}, "stop", "64"),
    # The chat template
    (H, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "messages"),
    (H, {"continue_final_message": True}, "continue_final_message", "user"),
    (H, {"continue_final_message": True, **with_calls(GO)}, "continue_final_message", "tool_calls"),
    (H, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", ""),
    (H, {"prediction": {"type": "text", "content": "a"}}, "prediction.type", '"text"'),
    # Tools
    (H, with_calls({"name": "a"}), "messages.1.tool_calls.0.function", ""),
    (H, {"tools": [{"function": {"name": 'a"b'}}]}, "tools.0.function.name", "a"),
    (H, {"tools": [{"type": "function", "function": STRICT}]}, "tools", "uniqueItems"),
    (A, {"tools": [{"name": 'a"b'}]}, "tools.0.name", "a"),
    (A, {"tools": [{"type": "bash_1"}, {"type": "custom", "name": 3}]}, "tools.1.name", "must be a string, got 3"),
    (H, {"tool_choice": "required"}, "tool_choice", "none"),
    (H, {"tools": HELD, "tool_choice": "zzz"}, "tool_choice", 'a function or allowed_tools, got "zzz"'),
    (H, {"tools": HELD, "tool_choice": 3}, "tool_choice", "a function or allowed_tools, got 3"),
    (
        H,
        {"tools": HELD, "tool_choice": {"type": "custom", "custom": {"name": "fly"}}},
        "tool_choice",
        'got {"type": "custom"',
    ),
    (H, {"tools": HELD, "tool_choice": {"type": "allowed_tools", "allowed_tools": 3}}, CHOSEN, "missing"),
    (H, {"tools": HELD, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools", "missing"),
    (
        H,
        {"tools": HELD, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}},
        "tool_choice",
        "got none",
    ),
    (R, {"tool_choice": {"type": "web_search"}}, "tool_choice", 'allowed_tools, got {"type": "web_search"}'),
    (R, {"tool_choice": {"type": "allowed_tools", "tools": 3}}, "tool_choice.tools", "must be a list, got 3"),
    (R, {"reasoning": {"effort": ""}}, "reasoning.effort", "at least 1 character"),
    (R, {"text": {"format": {**FORMAT, "schema": {"type": 3}}}}, "text.format", "#/type"),
    (A, {"output_config": {"format": {**FORMAT, "schema": {"type": 3}}}}, "output_config.format", "#/type"),
    (H, {"tools": HELD, "tool_choice": ALLOWED}, "tool_choice", "fly"),
    # Output formats
    (C, {"response_format": {"type": "xml"}}, "response_format.type", '"xml"'),
    (C, {"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    (C, {"structured_outputs": {"structural_tag": {}}}, "structural_tag", "tools"),
    (A, {"messages": [{"role": "user", "content": [PDF]}]}, "messages.0.content.0", "base64"),
    (A, {"messages": [*MESSAGES, {"role": "assistant", "content": [CALL]}]}, "messages", "tool_result"),
    (C, with_schema({"type": "bad"}), "response_format", "bad"),
    (C, with_schema({"$ref": "https://example.com/a.json"}), "response_format", "https://example.com/a.json"),
    (C, with_schema({"uniqueItems": True}, strict=True), "response_format", "uniqueItems"),
    (C, {"structured_outputs": {"regex": "a+"}, "min_tokens": 2}, "min_tokens", "structured_outputs"),
    (C, {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, SO, "response_format"),
    (C, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex, choice"),
    (C, {"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "[1]"),
    (C, {"structured_outputs": {"json": "[" * 9000}}, "structured_outputs.json", "JSON"),
    (C, {"structured_outputs": {"regex": "("}}, SO, "regex"),
    (C, {"structured_outputs": {"grammar": "{bad"}}, SO, "grammar"),
    (C, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "[]"),
    # Grammars without a complete, non-empty output
    (C, with_schema(CYCLE), "response_format", "#/$ref: admits no value"),
    (C, {"structured_outputs": {"grammar": 'root ::= ""'}}, SO, "no output except the empty one"),
    (C, {"structured_outputs": {"grammar": 'root ::= "x" a\na ::= a'}}, SO, "cannot be completed"),
]


@pytest.mark.parametrize(("path", "more", "param", "value"), REFUSED)
def test_invalid_fields_are_refused_by_name_and_value(server, path, more, param, value):
    """No field is named if the body cannot be parsed."""
    answer = post_raw(server, path, json.dumps({**ASKED[path], **more}), **{"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], answer.json()["type"]) == (400, "invalid_request_error", "error")
    assert error["param"] == param, error
    assert value in error["message"]
    assert len(error["message"]) <= 300
    assert server.engine.running == 0


OTHER_ERRORS = [
    (C, {"prompt": "a", "model": "another"}, 404, "model_not_found"),
    ("/v1/models/other/model", None, 404, "model_not_found"),
    ("/v1/embeddings", {"input": "a"}, 400, "unsupported"),
    (A, {**ASKED[A], "mcp_servers": [{"url": "https://example.com"}]}, 400, "unsupported"),
    ("/v1/nothing", {}, 404, "not_found"),
    ("/chat/completions", {}, 404, "not_found"),
]


@pytest.mark.parametrize(("path", "body", "status", "code"), OTHER_ERRORS)
def test_status_and_code_of_other_errors(server, path, body, status, code):
    answer = http.get(f"{server.url}{path}") if body is None else server.post(path, body)
    error = answer.json()["error"]
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert (answer.status_code, error["type"], error["code"]) == (status, kind, code)


LIMITS = [
    (C, {"prompt": [[5]] * 64, "n": 2, "max_tokens": 1}),
    (C, {"min_tokens": 8, "max_tokens": 8}),
    (C, {"stop": [*["x"] * 15, "a" * 128]}),
    (C, {"logit_bias": {"299": 100, "298": -100}}),
    (C, {"logprobs": 5, "prompt": [299]}),
    (H, {"logprobs": True, "top_logprobs": 20}),
]


@pytest.mark.parametrize(("path", "body"), LIMITS)
def test_values_at_the_limits_are_accepted(server, path, body):
    status, text = ask(server, path, **{"max_tokens": 8, **body})
    assert status == 200, text


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br", 415), ("identity", 200), ("Identity", 200)])
def test_compressed_bodies_are_refused(server, encoding, status):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    answer = post_raw(server, H, json.dumps({**ASKED[H], "max_tokens": 1}), **headers)
    assert answer.status_code == status
    assert status == 200 or f'Content-Encoding "{encoding}"' in answer.json()["error"]["message"]


def test_model_without_chat_template_refuses_chats(model):
    with serving(model, tiny.tokenizer()) as server:
        for path in (H, R, A):
            assert server.post(path, ASKED[path]).json()["error"]["code"] == "no_chat_template"
        assert server.complete().usage.completion_tokens == 8


def test_model_without_eos_token_refuses_structured_outputs(tokenizer):
    with serving(ascii_llama(), tokenizer) as server:
        for _ in range(2):
            status, text = ask(server, C, response_format={"type": "json_object"})
            assert (status, "eos_token_id" in text) == (400, True)


def test_tokens_that_the_model_does_not_embed_are_refused(model):
    """Gemma 3's tokenizer has one more than its models for text."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(301 - len(tokenizer))], special_tokens=True)
    text = tokenizer.convert_ids_to_tokens(300)
    said = [{"role": "user", "content": text}]
    with serving(model, tokenizer) as server:
        for path, field in ((C, "prompt"), (H, "messages"), (R, "input"), (A, "messages")):
            status, answer = ask(server, path, **{field: said if field == "messages" else text})
            assert (status, json.loads(answer)["error"]["param"]) == (400, field)


def test_tools_are_refused_with_old_transformers_releases(server, monkeypatch):
    monkeypatch.delattr(PreTrainedTokenizerBase, "get_response_parser")
    for path, tools in ((H, HELD), (R, [{"type": "function", **HELD[0]["function"]}])):
        error = server.post(path, {**ASKED[path], "tools": tools}).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported", "tools")
