"""The HTTP server around an app: uvicorn's, with limits on connections, and an end that streams are told of."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from .connections import BACKLOG, Connection, ConnectionLimits, OpenConnections, QuietAccepting

if TYPE_CHECKING:
    from fastapi import FastAPI

_ENDING = 5
"""Seconds after the grace period in which streams end with an error event, before they are cut off."""


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
        connections = OpenConnections(limits or ConnectionLimits())
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, connections),  # type: ignore[arg-type]
                backlog=BACKLOG,
                timeout_graceful_shutdown=grace + _ENDING,  # type: ignore[arg-type]
                **{"log_level": "warning", **uvicorns},
            )
        )
        self._service, self._grace, self._on_start = app.state.service, grace, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(QuietAccepting())
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
