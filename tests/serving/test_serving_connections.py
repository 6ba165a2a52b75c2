"""Clients that send half of a request, or too many, and those that come meanwhile."""

import asyncio
import contextlib
import itertools
import logging
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest
from starlette.responses import StreamingResponse
from support import tiny
from support.serving import serving, wait_for

from token_recycling.serving.http_server import ConnectionLimits, QuietAccepting

HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HALF_HEADERS, HALF_BODY = HEADERS, HEADERS + b'Content-Length: 100\r\n\r\n{"prompt": "'
LIMITS = ConnectionLimits(most=12, most_of_address=8, header_seconds=0.2, body_seconds=0.4)


@pytest.fixture(scope="module")
def server(model):
    with serving(model, tiny.tokenizer(), LIMITS) as running:
        yield running


@contextlib.contextmanager
def opened(server, count, sent=b"", source="127.0.0.1"):
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", server.port), timeout=5, source_address=(source, 0))
            stack.enter_context(one).sendall(sent)
            made.append(one)
        yield made


def answer(connection):
    """All that comes until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def healthy(server):
    return httpx2.get(f"{server.url}/health", timeout=5).json() == {"status": "ok"}


@pytest.mark.parametrize(("sent", "what"), [(b"", b"headers"), (HALF_HEADERS, b"headers"), (HALF_BODY, b"body")])
def test_half_a_request_is_given_up(server, sent, what):
    with opened(server, 1, sent) as (connection,):
        said = answer(connection)
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"the " + what + b" of a request must arrive within" in said
    assert server.service.running == 0


def test_one_that_sends_slowly_is_given_up_too(server):
    with opened(server, 1, HALF_BODY) as (connection,):
        connection.settimeout(0.05)
        said, sent = b"", 0
        while not said and sent < 40:
            with contextlib.suppress(TimeoutError):
                said = connection.recv(4096)
            with contextlib.suppress(OSError):
                connection.send(b"x")
            sent += 1
    assert said.startswith(b"HTTP/1.1 408 ")
    assert sent < 40


@pytest.mark.parametrize("sent", [b"", HALF_HEADERS, HALF_BODY])
def test_many_that_send_half_of_a_request_keep_nobody_out(model, sent):
    patient = ConnectionLimits(most=12, most_of_address=8, header_seconds=60, body_seconds=60)
    with serving(model, tiny.tokenizer(), patient) as server, opened(server, 200, sent) as made:
        assert healthy(server)
        assert len(server.server.server_state.connections) <= 8
        assert answer(made[0]).startswith(b"HTTP/1.1 503 ")


def test_addresses_have_limits_of_their_own(model):
    patient = ConnectionLimits(most=12, most_of_address=8, header_seconds=60, body_seconds=60)
    with (
        serving(model, tiny.tokenizer(), patient) as server,
        opened(server, 5, HALF_BODY, "127.0.0.2") as others,
        opened(server, 40, HALF_BODY),
    ):
        wait_for(lambda: len(server.server.server_state.connections) == 12)
        others[4].settimeout(0.05)
        with pytest.raises(TimeoutError):
            others[4].recv(1)
        assert healthy(server)


def test_where_all_are_being_answered_another_is_refused(model):
    limits = ConnectionLimits(most=2, most_of_address=2)
    with serving(model, tiny.tokenizer(), limits) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(
                server.client().completions.create(model="tiny", prompt="a", max_tokens=4000, stream=True)
            )
        with opened(server, 1) as (refused,):
            assert answer(refused).startswith(b"HTTP/1.1 503 ")


def test_one_that_takes_nothing_is_given_up(model):
    with serving(model, tiny.tokenizer(), ConnectionLimits(body_seconds=0.3)) as server:
        server.app.add_route("/endless", lambda request: StreamingResponse(itertools.repeat(b"x" * 65536)))
        with opened(server, 1, b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            wait_for(lambda: server.server.server_state.connections)
            wait_for(lambda: not server.server.server_state.connections)


def test_requests_finish_after_a_shutdown_has_begun(model):
    """Meanwhile the server accepts connections: a load balancer learns from /health that it is to send no more."""
    with serving(model, tiny.tokenizer(), grace=60) as server:
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 600}
        stream = server.client().completions.create(**asked, stream=True)
        next(iter(stream))
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(server.client().completions.create, **asked)
            wait_for(lambda: server.service.running == 2)
            server.server.should_exit = True
            wait_for(lambda: server.service.closing)
            assert httpx2.get(f"{server.url}/health", timeout=5).status_code == 503
            assert server.post("/v1/completions", asked).json()["error"]["code"] == "shutting_down"
            assert [part.choices[0].finish_reason for part in stream][-1] == "length"
            assert whole.result().usage.completion_tokens == 600


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_done_after_the_grace_period_is_an_error(model, stream):
    with serving(model, tiny.tokenizer(), grace=0.1) as server, ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "max_tokens": 4000, "stream": stream}
        answer = pool.submit(server.post, "/v1/completions", body)
        wait_for(lambda: server.service.running == 1)
        server.server.should_exit = True
        assert answer.result().status_code == (200 if stream else 503)
        assert "shutting_down" in answer.result().text


def test_limits_that_do_not_fit(monkeypatch):
    for wrong in ({"most": 0}, {"most_of_address": 0}, {"header_seconds": 0}, {"body_seconds": -1}):
        with pytest.raises(ValueError, match="must be > 0"):
            ConnectionLimits(**wrong)
    monkeypatch.setattr("token_recycling.serving.http_server._open_files", lambda: 256)
    assert ConnectionLimits().most == 64
    with pytest.raises(ValueError, match="<= 64, got 65"):
        ConnectionLimits(most=65)


def test_accept_errors_are_logged_once_a_second(caplog):
    loop, handler = asyncio.new_event_loop(), QuietAccepting()
    with contextlib.closing(loop), caplog.at_level(logging.ERROR, "asyncio"):
        for _ in range(100):
            handler(loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "files")})
        handler(loop, {"message": "something else"})
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "socket.accept() out of system resource",
        "something else",
    ]
