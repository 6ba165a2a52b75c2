"""The HTTP server around an app: uvicorn's, with limits on connections, and an end that streams are told of.

A server that waits for ever for the rest of a request can be stopped by anyone who opens enough of them. So headers and
bodies have deadlines, as have clients that take nothing of what is sent to them, and the number of connections is
limited, in all and for each address. At a limit a new one takes the place of the one that has waited longest for its
request; where all are being answered, it is refused with 503. So whoever sends a whole request is heard, however many
send half of one. Cost: a timer for each request.

This is the one file that stands on a class of uvicorn's own, its protocol of HTTP/1.1 with h11: uvicorn has no such
deadlines and no other way to add them, and granian (2.8) has one for headers alone.
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

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .._util.options import check_above
from .errors import error_body

if TYPE_CHECKING:
    from fastapi import FastAPI

_BACKLOG = 128
"""Connections that the system accepts before the server does."""
_OWN_FILES = 64
"""Descriptors that are no connections: files, the event loop, libraries."""
_ENDING = 5
"""Seconds after the grace period in which streams end with an error event, before they are cut off."""


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections there may be, and how long they may take."""

    most: int | None = None
    """In all; None: 512, or fewer where the process may not open as many files."""
    most_of_address: int = 128
    header_seconds: float = 10.0
    """From the beginning of a request, or of the connection, to the end of its headers."""
    body_seconds: float = 30.0
    """From there to the end of the body; also how long a client may take nothing of what is sent to it."""

    def __post_init__(self) -> None:
        check_above(0, self, "most", "most_of_address", "header_seconds", "body_seconds")
        room = _open_files() - _BACKLOG - _OWN_FILES
        if self.most is None:
            object.__setattr__(self, "most", max(1, min(512, room)))
        elif self.most > room:
            raise ValueError(
                f"expected at most {room} connections, since this process may open {_open_files()} files, got "
                f"{self.most}; raise the limit (`ulimit -n`), or allow fewer"
            )


def _open_files() -> float:
    """How many files the process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return float("inf")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else limit


@dataclass
class OpenConnections:
    """The connections that a server has."""

    limits: ConnectionLimits
    waiting: dict[Connection, None] = field(default_factory=dict)
    """Those whose request has not come whole, in the order in which they began to wait."""
    of_address: dict[str, int] = field(default_factory=dict)

    def admit(self, address: str) -> bool:
        """Whether one more of that address may come; another may have to go for it."""
        if self.of_address.get(address, 0) >= self.limits.most_of_address:
            oldest = next((one for one in self.waiting if one.address == address), None)
        elif sum(self.of_address.values()) >= (self.limits.most or 0):
            oldest = next(iter(self.waiting), None)
        else:
            return True
        if oldest is not None:
            oldest.give_up(503, "the server has as many connections as it takes")
        return oldest is not None

    def add(self, address: str, change: int) -> None:
        """One more, or one less."""
        self.of_address[address] = self.of_address.get(address, 0) + change
        if not self.of_address[address]:
            del self.of_address[address]


class Connection(H11Protocol):
    """A connection with deadlines: uvicorn's own, which has none but between two requests."""

    def __init__(self, connections: OpenConnections, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._all, self.address = connections, ""
        self._deadline: asyncio.TimerHandle | None = None
        self._stage: Any = None
        self._counted = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        admitted = self._all.admit(self.address)
        self._all.add(self.address, 1)
        self._counted = True
        if admitted:
            self._watch()
        else:
            self.give_up(503, "the server has as many connections as it takes")

    def data_received(self, data: bytes) -> None:
        if not self._counted:
            return
        if self._stage is None:
            self._watch()
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and self._counted:
            # uvicorn's own timer runs until the next request begins.
            self._all.waiting[self] = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait("write", self._all.limits.body_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stage = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._leave()

    def give_up(self, status: int, why: str) -> None:
        """Closes the connection, with an answer where a request has begun and none is on its way."""
        idle = self._deadline is None and self.cycle is not None
        answering = self.conn.their_state is not h11.IDLE and self.cycle is not None and self.cycle.response_started
        self._leave()
        if not idle and not answering:
            body = json.dumps(error_body(status, why, "connection_closed")).encode()
            head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(f"{head}{length}".encode() + body)
        self.transport.close()

    def _watch(self) -> None:
        """Sets the deadline of what the client has to send next."""
        stage, limits = self.conn.their_state, self._all.limits
        if not self._counted or self._stage == "write" or stage is self._stage:
            return
        if stage is h11.IDLE:
            self._wait(stage, limits.header_seconds, self._too_slow, "headers", limits.header_seconds)
        elif stage is h11.SEND_BODY:
            self._wait(stage, limits.body_seconds, self._too_slow, "body", limits.body_seconds)
        else:
            self._stop_waiting()

    def _wait(self, stage: Any, seconds: float, late: Any, *arguments: Any) -> None:
        self._stop_waiting()
        self._stage, self._deadline = stage, self.loop.call_later(seconds, late, *arguments)
        self._all.waiting[self] = None

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._stage = None
        self._all.waiting.pop(self, None)

    def _too_slow(self, what: str, seconds: float) -> None:
        self.give_up(408, f"expected the {what} of a request within {seconds:g} s, got a part; send it at once")

    def _leave(self) -> None:
        self._stop_waiting()
        if self._counted:
            self._counted = False
            self._all.add(self.address, -1)


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
                backlog=_BACKLOG,
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
