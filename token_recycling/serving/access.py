"""Checks that every request passes before its route: counting, body size, host and origin, API key.

Any web page can make a browser send requests to a server on the user's machine: to 127.0.0.1, with the page's site in
the header Origin, or to its own host name that resolves to 127.0.0.1 (DNS rebinding), with that name in Host. So both
headers of a request to a loopback address must name this machine if the server has no keys.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .._util.network import is_loopback
from .errors import ApiError, error_body, shown
from .keys import METRICS, Key, find_key
from .metrics import Metrics


async def client_key(request: Request) -> Key | None:
    """Return the API key of a client, None if no keys are configured; raise ApiError for an invalid or missing key."""
    keys, key = _keys(request)
    if keys and (key is None or key.name == METRICS):
        raise _unauthorized("an API key of this server, as `Authorization: Bearer KEY` or `x-api-key: KEY`")
    return key


async def _metrics_key(request: Request) -> Key | None:
    """Return the key for /metrics, whose totals reveal information about other users; raise ApiError."""
    keys, key = _keys(request)
    if keys and (key is None or key.name != METRICS):
        raise _unauthorized(f"the API key with the name {METRICS!r}")
    return key


def _keys(request: Request) -> tuple[tuple[Key, ...], Key | None]:
    """Return the configured keys, and the one that the request carries. A proxy may add its password next to the key
    of an Anthropic client.
    """
    keys = request.app.state.engine.settings.keys
    return keys, find_key(keys, request.headers.get("authorization")) or find_key(keys, _of_anthropic(request))


def _of_anthropic(request: Request) -> str | None:
    """Return the key from the header of Anthropic's clients, converted to OpenAI's form."""
    key = request.headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def _unauthorized(needed: str) -> ApiError:
    message = f"invalid or missing API key: this route needs {needed}"
    return ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


User = Annotated[Key | None, Depends(client_key)]
"""Parameter type of a route that needs an API key if keys are configured."""
MetricsUser = Annotated[Key | None, Depends(_metrics_key)]
"""Parameter type of a route that accepts only the key named `metrics` if keys are configured."""


_OF_PROXIES = {b"forwarded", b"via", b"x-real-ip"}


def is_local(scope: Scope) -> bool:
    """Return whether a request to a loopback address was made on this machine, rather than forwarded by a proxy.

    A proxy on the same machine also connects from a loopback address, and by default nginx replaces Host with the
    address of this server. A proxy is recognized by the headers that proxies add and by HTTP/1.0, the default of nginx
    before 1.29.7, which no current client uses.
    """
    headers = dict(scope["headers"])
    forwarded = any(name in _OF_PROXIES or name.startswith(b"x-forwarded-") for name in headers)
    named = _hostname(f"//{headers.get(b'host', b'').decode('latin-1')}")
    return not forwarded and is_loopback(named) and scope.get("http_version", "1.1") != "1.0"


def _hostname(address: str) -> str:
    """Return the host name in an address; an empty string if the address is malformed."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


_OPTIONS = {"Host": "host", "Origin": "origin"}


class LocalNamesMiddleware:
    """ASGI middleware that rejects requests that name other hosts. `allowed`: further host names; `origins`: origins of
    web pages, `*` for any.
    """

    def __init__(self, app: ASGIApp, allowed: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._app, self._allowed, self._origins = app, {name.lower() for name in allowed}, {*origins}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = self._foreign(scope) if scope["type"] == "http" else None
        if foreign is None:
            await self._app(scope, receive, send)
            return
        message = (
            f"{foreign} must name this machine; start the server with --allow-{_OPTIONS[foreign]} to allow another"
        )
        await JSONResponse(error_body(403, message, "foreign_host"), 403)(scope, receive, send)

    def _foreign(self, scope: Scope) -> str | None:
        """Return the name of the header that names another machine, or None."""
        if not is_loopback((scope.get("server") or ("",))[0]):
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not self._known(f"//{headers.get(b'host', '')}"):
            return "Host"
        origin = headers.get(b"origin")
        if origin is None or self._known(origin) or not self._origins.isdisjoint({origin, "*"}):
            return None
        return "Origin"

    def _known(self, address: str) -> bool:
        name = _hostname(address)
        return is_loopback(name) or name in self._allowed


_SLASHES = re.compile("//+")


def _as_routed(scope: Scope) -> Scope:
    """Return a request normalized for routing. HEAD is handled as GET, since the HTTP server omits the body.
    Superfluous slashes, which come from base URLs, are removed.
    """
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    return {**scope, "method": method, "path": f"/{_SLASHES.sub('/', scope['path']).strip('/')}"}


class LimitMiddleware:
    """ASGI middleware that counts requests, rejects compressed bodies, and stops reading a body at the size limit."""

    def __init__(self, app: ASGIApp, max_bytes: int, metrics: Metrics) -> None:
        self._app, self._max_bytes, self._metrics = app, max_bytes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = _as_routed(scope)
        read, began, status = 0, time.monotonic(), 499  # if the client disconnects before the response

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise self._too_large()
            return message

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        error = self._refusal(dict(scope["headers"]))
        try:
            if error is not None:
                body = error_body(error.status_code, error.detail, error.code)
                await JSONResponse(body, error.status_code)(scope, receive, watched)
            else:
                await self._app(scope, limited, watched)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.count_request(path, status, time.monotonic() - began)

    def _refusal(self, headers: dict[bytes, bytes]) -> ApiError | None:
        """Return the error for a body that is rejected by its headers, or None."""
        length, encoding = headers.get(b"content-length", b"0"), headers.get(b"content-encoding", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            return self._too_large()
        if encoding.lower() not in (b"", b"identity"):
            name = shown(encoding.decode("latin-1"))
            return ApiError(415, f"Content-Encoding {name} is not supported; send the body uncompressed", "unsupported")
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body must have at most {self._max_bytes:,} bytes, got more", "request_too_large")
