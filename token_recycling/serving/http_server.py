"""The HTTP server around an app: uvicorn's, with limits on connections, and an end that streams are told of."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from .connections import BACKLOG, Connection, ConnectionLimits, OpenConnections, QuietAccepting

if TYPE_CHECKING:
    from fastapi import FastAPI

_ENDING = 5
"""Seconds after the grace period in which streams end with an error event, before they are cut off."""


def check_tls(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    """The arguments of `HttpServer` for TLS; raises ValueError for files that cannot be used."""
    if certificate is None and key is None:
        return {}
    if certificate is None or key is None:
        raise ValueError("expected --tls-certificate and --tls-key, got one of them")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(
            f"expected a certificate and its key without a password, in PEM, got {certificate} and {key}: {why}"
        ) from None
    return {"ssl_certfile": certificate, "ssl_keyfile": key}


class HttpServer(uvicorn.Server):
    """Serves an app in one process. `grace`: seconds that running requests have at shutdown; `on_start` is called once
    connections are accepted; other arguments are those of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        limits: ConnectionLimits | None = None,
        grace: float = 10,
        on_start: Callable[[], None] = lambda: None,
        **uvicorns: Any,
    ) -> None:
        self._limits = limits or ConnectionLimits()
        connections = OpenConnections(self._limits)
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=partial(Connection, connections),  # type: ignore[arg-type]
                backlog=BACKLOG,
                timeout_graceful_shutdown=grace + _ENDING,  # type: ignore[arg-type]
                **{"log_level": "warning", **uvicorns},
            )
        )
        self._service, self._grace, self._on_start = app.state.service, grace, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_exception_handler(QuietAccepting())
        if self.config.is_ssl:
            # uvicorn leaves the deadline of a handshake to asyncio, which waits a minute.
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=self._limits.header_seconds)
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.closing = True
        ending = asyncio.get_running_loop().call_later(self._grace, self._service.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
