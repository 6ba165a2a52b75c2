"""Shutdown, and the limit on connections."""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import http, tiny
from support.serving import serving, wait_for

from token_recycling.serving.api import common
from token_recycling.serving.engine import Job


def test_connections_beyond_the_limit_get_503(model):
    with serving(model, tiny.tokenizer(), max_connections=8) as server:
        opened = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(8)]
        try:
            wait_for(lambda: len(server.server.server_state.connections) == 8)
            assert http.get(f"{server.url}/health", timeout=5).status_code == 503
        finally:
            for connection in opened:
                connection.close()
        wait_for(lambda: not server.server.server_state.connections)
        assert http.get(f"{server.url}/health", timeout=5).status_code == 200


def test_tcp_nodelay_is_set(model):
    with serving(model, tiny.tokenizer()) as server, socket.create_connection(("127.0.0.1", server.port), timeout=5):
        wait_for(lambda: server.server.server_state.connections)
        (connection,) = server.server.server_state.connections
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_stream_ends_if_the_client_stops_reading(monkeypatch):
    """Its generation is cancelled, and no error is raised."""
    monkeypatch.setattr(common, "_SEND_TIMEOUT", 0.05)
    sent, job = [], Job(new_drafter=lambda: None)

    async def events():
        while True:
            yield b"data: 1\n\n"

    async def send(message):
        sent.append(message)
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)

    async def receive():
        await asyncio.sleep(60)

    scope = {"type": "http", "method": "POST", "path": "/"}
    asyncio.run(asyncio.wait_for(common.EventStream(job, events(), {})(scope, receive, send), 10))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert job.cancelled


def test_running_requests_finish_during_shutdown(model):
    """Meanwhile the server accepts connections: /health tells a load balancer to send no more requests."""
    with serving(model, tiny.tokenizer(), grace=60) as server:
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 600}
        stream = server.client().completions.create(**asked, stream=True)
        next(iter(stream))
        with ThreadPoolExecutor() as pool:
            whole = pool.submit(server.client().completions.create, **asked)
            wait_for(lambda: server.engine.running == 2)
            server.server.should_exit = True
            wait_for(lambda: server.engine.closing)
            assert http.get(f"{server.url}/health", timeout=5).status_code == 503
            assert server.post("/v1/completions", asked).json()["error"]["code"] == "shutting_down"
            assert [part.choices[0].finish_reason for part in stream][-1] == "length"
            assert whole.result().usage.completion_tokens == 600


@pytest.mark.parametrize("stream", [False, True])
def test_requests_fail_after_the_grace_period(model, stream):
    with serving(model, tiny.tokenizer(), grace=0.1) as server, ThreadPoolExecutor() as pool:
        body = {"prompt": "a", "max_tokens": 4000, "stream": stream}
        answer = pool.submit(server.post, "/v1/completions", body)
        wait_for(lambda: server.engine.running == 1)
        server.server.should_exit = True
        assert answer.result().status_code == (200 if stream else 503)
        assert "shutting_down" in answer.result().text
