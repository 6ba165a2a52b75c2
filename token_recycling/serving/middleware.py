"""What every request passes first: its size is limited, and its answer is counted."""

from __future__ import annotations

import time

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_body
from .logs import log_answer
from .metrics import Metrics


class LimitMiddleware:
    """ASGI middleware; a body that is too large is not read to its end."""

    def __init__(self, app: ASGIApp, max_bytes: int, metrics: Metrics) -> None:
        self._app, self._max_bytes, self._metrics = app, max_bytes, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        read, began = 0, time.monotonic()

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._max_bytes:
                raise self._too_large()
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.count_request(path, message["status"])
                log_answer(path, message["status"], time.monotonic() - began)
            await send(message)

        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            error = self._too_large()
            response = JSONResponse(error_body(413, error.detail, error.code), 413)
            await response(scope, receive, counted)
            return
        await self._app(scope, limited, counted)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"expected a body of at most {self._max_bytes:,} bytes, got more", "request_too_large")
