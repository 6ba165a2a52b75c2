"""What a request does wrong is said, with status 400; what fails in the server is in its log alone, with 500."""

import asyncio
import contextlib

import pytest
from support import tiny
from support.serving import keys, matrix_path, serving
from support.speaking import chatty

from token_recycling.model.loading import Loaded
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
    assert "the server failed; its log says how" in text
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
        assert "the server failed; its log says how" in text
        assert "delete it to start anew" in caplog.text


@pytest.mark.parametrize(("path", "stream"), WAYS)
def test_what_transformers_refuses_is_said(server, caplog, path, stream):
    status, text = ask(server, path, stream, generation_config='{"bad_words_ids": "none"}')
    assert stream or status == 400
    assert "bad_words_ids" in text
    assert not [record for record in caplog.records if record.name == "token_recycling.serving"]


@pytest.mark.parametrize("given", ['{"bad_words_ids": [[5], [300]]}', '{"sequence_bias": [[[5, 300], 1.5]]}'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_tokens_that_are_none_are_said(server, path, given):
    status, text = ask(server, path, False, generation_config=given)
    assert (status, "expected token ids below 300, got 300" in text) == (400, True)
    shorter = given.replace("300", "299").replace("{", '{"max_new_tokens": 3, ')
    assert ask(server, path, False, generation_config=shorter)[0] == 200


def test_what_fails_at_start_is_said(model, monkeypatch):
    monkeypatch.setattr(model.generation_config, "num_beams", 2)
    service = Service(Loaded(model, tiny.tokenizer()), Settings())
    with contextlib.closing(service), pytest.raises(RuntimeError, match=r"a first text, got ValueError: .*num_beams"):
        asyncio.run(service.open())


def test_what_a_template_refuses_is_said(server, monkeypatch):
    monkeypatch.setattr(server.service.loaded.tokenizer, "chat_template", "{{ raise_exception('must alternate') }}")
    status, text = ask(server, "/v1/chat/completions", False)
    assert (status, "must alternate" in text) == (400, True)
