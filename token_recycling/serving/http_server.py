"""The HTTP server around an app: uvicorn, with a shutdown that lets requests finish.

Slow clients are the proxy's: uvicorn has no deadline for the headers or the body of a request. docs/serving.md has a
configuration of nginx.
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
    """Serves an app in one process, at the address and with the TLS, the log, the `max_connections` and the `grace` of
    its settings. `on_start` is called once connections are accepted; other arguments are those of `uvicorn.Config`.
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
            # Connections inherit it. asyncio sets it only where a socket was made with its protocol by name; without
            # it every event of a stream waits for the receipt of the one before, up to 40 ms.
            if listener.family != getattr(socket, "AF_UNIX", None):
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, for the grace period, then end the others with an error. Meanwhile connections
        are accepted: /health and new requests get 503.
        """
        self._engine.closing = True
        until = time.monotonic() + self._engine.settings.grace
        while self._engine.running and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
        self._engine.end_all()
        await super().shutdown(sockets)
