"""The HTTP server around an app: uvicorn, with limits on connections and a shutdown that lets requests finish.

uvicorn has no time limit for the headers and the body of a request, so anyone who opens enough connections and sends
half a request in each could stop a server that has no proxy in front of it. Here both have deadlines, as have clients
that do not read their response, and the number of connections is limited, in total and per address. At a limit, a new
connection replaces the one that has waited longest for its request; if all of them are being answered, it gets 503. So
complete requests are answered however many incomplete ones are open. Cost: one timer per request.

A connection is uvicorn's HTTP/1.1 protocol, of which only the methods of `asyncio.Protocol` are extended; the progress
of a request is seen by an ASGI wrapper around the app (`_Watched`).
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from .._util.options import check_above
from .errors import ApiError, error_body

if TYPE_CHECKING:
    from fastapi import FastAPI

_BACKLOG = 128
"""Connections that the system accepts before the server does."""
_OWN_FILES = 64
"""Descriptors that are no connections: files, the event loop, libraries."""
_ENDING = 5
"""Seconds after the grace period in which streams end with an error event, before they are cut off."""
_FULL = "the server has as many connections as it takes"


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be, and how long they may take."""

    most: int | None = None
    """In total; None: 512, or fewer where the process may not open as many files."""
    most_of_address: int = 128
    header_seconds: float = 10.0
    """From the first byte of a request, or from the start of the connection, to the end of its headers."""
    body_seconds: float = 30.0
    """From there to the end of the body; also the time for which a client may read nothing of its response."""

    def __post_init__(self) -> None:
        check_above(0, self, "most", "most_of_address", "header_seconds", "body_seconds")
        room = _open_files() - _BACKLOG - _OWN_FILES
        if self.most is None:
            object.__setattr__(self, "most", max(1, min(512, room)))
        elif self.most > room:
            raise ValueError(
                f"max_connections must be <= {room}, got {self.most}: this process may open {_open_files()} files; "
                "raise the limit (`ulimit -n`) or allow fewer"
            )


def _open_files() -> float:
    """Return how many files the process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return float("inf")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else limit


@dataclass
class OpenConnections:
    """The connections of a server, by the client's address and port."""

    limits: ConnectionLimits
    open: dict[tuple[str, int], Connection] = field(default_factory=dict)
    waiting: dict[Connection, None] = field(default_factory=dict)
    """Those that have not sent a whole request, in the order in which they began to wait."""

    def admit(self, address: str) -> bool:
        """Return whether one more of that address may come; it may replace another."""
        if sum(host == address for host, _ in self.open) >= self.limits.most_of_address:
            oldest = next((one for one in self.waiting if one.key[0] == address), None)
        elif len(self.open) >= (self.limits.most or 0):
            oldest = next(iter(self.waiting), None)
        else:
            return True
        if oldest is not None:
            oldest.give_up(503, _FULL)
        return oldest is not None


class Connection(H11Protocol):
    """A connection of a client, with deadlines for what it sends and reads."""

    def __init__(self, connections: OpenConnections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._all, self._limits = connections, connections.limits
        self.key: tuple[str, int] = ("", 0)
        self._timer: asyncio.TimerHandle | None = None
        self._idle = self._answering = False
        """Whether it waits between two requests, and whether a response has begun."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.key = (transport.get_extra_info("peername") or ("", id(self)))[:2]
        admitted = self._all.admit(self.key[0])
        self._all.open[self.key] = self
        self._await_headers()
        if not admitted:
            self.give_up(503, _FULL)

    def data_received(self, data: bytes) -> None:
        if self.key not in self._all.open:
            return
        if self._idle:
            self._await_headers()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit(self._limits.body_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit(None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def begin(self) -> None:
        """The headers of a request are complete; its body may be on its way."""
        self._idle = self._answering = False
        self._limit(None)

    def answer(self) -> None:
        """The request is complete, or its response begins: nothing is awaited from the client."""
        self._answering = True
        self._all.waiting.pop(self, None)

    def end(self) -> None:
        """The response is complete; uvicorn closes the connection if no further request begins."""
        if self.key in self._all.open:
            self._idle, self._answering = True, False
            self._all.waiting[self] = None

    def give_up(self, status: int, why: str) -> None:
        """Close the connection, with a response unless one has begun or the client is between two requests."""
        self._leave()
        if not self._idle and not self._answering:
            body = json.dumps(error_body(status, why, "connection_closed")).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(f"{head}{length}".encode() + body)
        self.transport.close()

    def _await_headers(self) -> None:
        seconds = self._limits.header_seconds
        self._idle = self._answering = False
        self._all.waiting.setdefault(self, None)
        self._limit(seconds, self.give_up, 408, too_slow("headers", seconds))

    def _limit(self, seconds: float | None, late: Callable[..., Any] = print, *arguments: Any) -> None:
        """Replace the deadline of this connection; None: there is none."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, late, *arguments)

    def _leave(self) -> None:
        self._limit(None)
        self._all.waiting.pop(self, None)
        self._all.open.pop(self.key, None)


def too_slow(part: str, seconds: float) -> str:
    """Return the message for a client that is too slow."""
    return f"the {part} of a request must arrive within {seconds:g} s; send them at once"


class _Watched:
    """ASGI wrapper that tells a connection how far its request is, and limits the time for the body."""

    def __init__(self, app: ASGIApp, connections: OpenConnections) -> None:
        self._app, self._all = app, connections

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = self._all.open.get(tuple(scope.get("client") or ()))
        if scope["type"] != "http" or connection is None:
            await self._app(scope, receive, send)
            return
        connection.begin()
        seconds, complete = self._all.limits.body_seconds, False
        deadline = time.monotonic() + seconds

        async def limited() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), deadline - time.monotonic())
            except TimeoutError:
                why = too_slow("body", seconds)
                raise ApiError(408, why, "connection_closed", headers={"Connection": "close"}) from None
            if not message.get("more_body", False):
                complete = True
                connection.answer()
            return message

        async def watched(message: Message) -> None:
            connection.answer()
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                connection.end()

        await self._app(scope, limited, watched)


class QuietAccepting:
    """An event loop's exception handler that logs once a second that a connection could not be accepted; everything
    else is logged as ever.
    """

    def __init__(self) -> None:
        self._last, self._since = float("-inf"), 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not str(context.get("message")).startswith("socket.accept()"):
            loop.default_exception_handler(context)
            return
        self._since += 1
        now = time.monotonic()
        if now - self._last >= 1:
            about = f"{context['message']} ({self._since} times since it was last logged)"
            loop.default_exception_handler({"message": about, "exception": context.get("exception")})
            self._last, self._since = now, 0


def check_tls(certificate: Path | None, key: Path | None) -> dict[str, Any]:
    """Return the arguments of `HttpServer` for TLS; raises ValueError for files that cannot be used."""
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
    """Serves an app in one process. `grace`: seconds for running requests to finish at shutdown; `on_start` is called
    once connections are accepted; other arguments are those of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        limits: ConnectionLimits | None = None,
        grace: float = 10,
        on_start: Callable[[], None] = lambda: None,
        **uvicorns: Any,
    ) -> None:
        self.limits = limits or ConnectionLimits()
        connections = OpenConnections(self.limits)
        super().__init__(
            uvicorn.Config(
                _Watched(app, connections),
                loop="asyncio",
                http=partial(Connection, connections),  # type: ignore[arg-type]
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_ENDING,
                ws="none",
                proxy_headers=False,  # a connection is known by its own address
                **{"log_level": "warning", **uvicorns},
            )
        )
        self._service, self.grace, self._on_start = app.state.service, grace, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.set_exception_handler(QuietAccepting())
        if self.config.is_ssl:
            # uvicorn leaves the deadline of a handshake to asyncio, which waits a minute.
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=self.limits.header_seconds)
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests finish, for `grace` seconds, then end the others with an error. Meanwhile connections
        are accepted: /health and new requests get 503.
        """
        self._service.closing = True
        until = time.monotonic() + self.grace
        while self._service.running and time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
        self._service.end_all()
        await super().shutdown(sockets)
