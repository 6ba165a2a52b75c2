"""What every request passes first: its size is limited, and its answer is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_body

if TYPE_CHECKING:
    from .service import Service


class Gate:
    """ASGI middleware; a body that is too large is not read to its end."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._most = int(service.settings.max_body * 1_000_000)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._most:
                raise self._too_large()
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._service.metrics.count_request(path, message["status"])
            await send(message)

        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._most:
            error = self._too_large()
            response = JSONResponse(error_body(413, str(error.detail), error.code), 413)
            await response(scope, receive, counted)
            return
        await self._app(scope, limited, counted)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"expected a body of at most {self._most:,} bytes, got more", "request_too_large")
