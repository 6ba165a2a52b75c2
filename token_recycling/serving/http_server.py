"""The HTTP server of an app: uvicorn, with a shutdown that lets in-flight requests finish.

A reverse proxy must handle slow clients, since uvicorn has no deadline for the headers or the body of a request.
docs/serving.md has an nginx configuration.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvicorn

from .metrics import log_json_lines

if TYPE_CHECKING:
    from fastapi import FastAPI

_ENDING = 5
"""Seconds after the grace period in which streams end with an error event, before they are cut off."""


class HttpServer(uvicorn.Server):
    """Serves an app in one process. Address, TLS files, log format, `max_connections` and `grace` come from the
    engine's settings. `on_start` is called once connections are accepted; other arguments go to `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        on_start: Callable[[], None] = lambda: None,
        **uvicorns: Any,
    ) -> None:
        self._engine, self._on_start = app.state.engine, on_start
        settings = self._engine.settings
        options = {
            "host": settings.host,
            "port": settings.port,
            "ssl_certfile": settings.tls_certificate,
            "ssl_keyfile": settings.tls_key,
            "limit_concurrency": settings.max_connections,
            "timeout_graceful_shutdown": _ENDING,
            "loop": "asyncio",
            "log_level": "warning",
            "proxy_headers": False,
            "ws": "none",
        }
        if settings.log_format == "json":
            log_json_lines()
            options["log_config"] = None
        super().__init__(uvicorn.Config(app, **{**options, **uvicorns}))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or ():
            # Connections inherit TCP_NODELAY. asyncio sets it only for sockets created with an explicit protocol
            # number. Without it, every event of a stream waits up to 40 ms for the acknowledgment of the previous one.
            if listener.family != getattr(socket, "AF_UNIX", None):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let in-flight requests finish within the grace period, then end the rest with an error. Connections are still
        accepted meanwhile, but /health and new requests get 503.
        """
        self._engine.closing = True
        until = time.monotonic() + self._engine.settings.grace
        while self._engine.running and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
        self._engine.end_all()
        await super().shutdown(sockets)
