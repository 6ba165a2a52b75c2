"""Which names a server answers to: where no key protects it, those of this machine alone.

A web page of anyone can make a browser send requests to a server on the same machine: to 127.0.0.1, which the header
Origin tells, or to a name of its own that resolves to 127.0.0.1 (DNS rebinding), which the header Host tells. So what
comes to a loopback address of a server without keys must name this machine in both.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import error_body
from .isolation import is_loopback


class LocalNamesMiddleware:
    """ASGI middleware; `allowed` are further names."""

    def __init__(self, app: ASGIApp, allowed: Iterable[str] = ()) -> None:
        self._app, self._allowed = app, {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = self._foreign(scope) if scope["type"] == "http" else None
        if foreign is None:
            await self._app(scope, receive, send)
            return
        message = f"expected a {foreign} of this machine, got another one; --allow-host allows it"
        await JSONResponse(error_body(403, message, "foreign_host"), 403)(scope, receive, send)

    def _foreign(self, scope: Scope) -> str | None:
        """The header that names another machine, or None."""
        if not is_loopback((scope.get("server") or ("",))[0]):
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if not self._known(f"//{headers.get(b'host', '')}"):
            return "Host"
        if b"origin" in headers and not self._known(headers[b"origin"]):
            return "Origin"
        return None

    def _known(self, address: str) -> bool:
        try:
            name = urlsplit(address).hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in self._allowed
