"""The HTTP server around an app: uvicorn, with a shutdown that lets requests finish.

Slow clients are the proxy's: uvicorn has no deadline for the headers or the body of a request. docs/serving.md has a
configuration of nginx.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI

_ENDING = 5
"""Seconds after the grace period in which streams end with an error event, before they are cut off."""


def tls_options(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    """Return uvicorn's options for TLS; raise ValueError for files that cannot be used."""
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        raise ValueError("--tls-certificate and --tls-key are needed together, got one of them")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(
            f"{certificate} and {key} must be a certificate and its key in PEM, without a password: {why}"
        ) from None
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


class HttpServer(uvicorn.Server):
    """Serves an app in one process, with the `max_connections` and the `grace` of its settings. `on_start` is called
    once connections are accepted; other arguments are those of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        on_start: Callable[[], None] = lambda: None,
        **uvicorns: Any,
    ) -> None:
        self._engine, self._on_start = app.state.engine, on_start
        options = {"log_level": "warning", "proxy_headers": False, "ws": "none", **uvicorns}
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                limit_concurrency=self._engine.settings.max_connections,
                timeout_graceful_shutdown=_ENDING,
                **options,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
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
