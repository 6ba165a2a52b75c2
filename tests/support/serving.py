"""A server in tests: the app in its own thread, on a free port, with the official client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import uvicorn.server
from openai import DefaultHttpxClient, OpenAI
from support import http

from token_recycling.serving import create_app, parse_keys
from token_recycling.serving.http_server import HttpServer

PROMPT = "for index in"


class QuickAsyncio:
    """asyncio with shorter sleeps: uvicorn sleeps 0.1 s before each check for shutdown, and while shutting down."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


uvicorn.server.asyncio = QuickAsyncio()


class Serving:
    """A running server: its address, its engine and its clients."""

    def __init__(self, app: Any, port: int, server: HttpServer) -> None:
        self.app, self.engine, self.port, self.server = app, app.state.engine, port, server
        self.url = f"http://127.0.0.1:{port}"

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300,
            http_client=DefaultHttpxClient(verify=http.TLS),
        )  # fmt: skip

    def complete(self, key: str = "none", **more: Any) -> Any:
        """Return a completion or its stream from the official client."""
        return self.client(key).completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 8, **more})

    def post(self, path: str, body: Any, key: str | None = None, **more: Any) -> httpx2.Response:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return http.post(f"{self.url}{path}", json=body, headers=headers, timeout=300, **more)

    def steps(self, key: str | None = None, **body: Any) -> list[tuple[str, Any]]:
        """Return the events of /v1/token_recycling/steps."""
        answer = self.post("/v1/token_recycling/steps", body, key)
        assert answer.status_code == 200, answer.text
        events = [event.split("\n", 1) for event in answer.text.split("\n\n") if event]
        return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]

    def metrics(self, key: str | None = None) -> dict[str, float]:
        """Return the values of /metrics."""
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = http.get(f"{self.url}/metrics", headers=headers)
        assert answer.status_code == 200
        lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        wait_for(lambda: self.engine.running == 0, seconds)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    model: Any,
    tokenizer: Any,
    **settings: Any,
) -> Iterator[Serving]:
    settings = {"name": "tiny", "drafter": "recycling:tree=8", "grace": 5.0, **settings}
    app = create_app(model, tokenizer, **settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(app, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_for(lambda: server.started or not thread.is_alive(), 300)
        assert server.started
        yield Serving(app, listener.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def keys(*names: str) -> Any:
    """Return API keys; the key of NAME is secret-NAME."""
    return parse_keys([f"{name}:secret-{name}" for name in names])


def matrix_path(folder: Path) -> Path:
    return folder / "learned.matrix"
