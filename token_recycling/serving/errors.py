"""Errors as OpenAI's API gives them: a status, and a body that its clients turn into an exception."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

logger = logging.getLogger("token_recycling.serving")
_UNREADABLE = "the body must be a JSON object in UTF-8"
_SHOWN = 40
"""Characters of a value that an error repeats."""
_KIND_NAMES = ("str", "int", "float", "bool")
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An error for the client: a status, a sentence, and a code that programs can read."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    def __str__(self) -> str:
        return self.detail


def _unreadable() -> ApiError:
    return ApiError(400, _UNREADABLE, "invalid_body")


def unread(error: HTTPException) -> bool:
    """Whether the server's framework could not read a body."""
    return error.status_code == 400 and not isinstance(error, ApiError)


def invalid(field: str, message: str) -> ApiError:
    """The error for a field of a request whose value is wrong."""
    return ApiError(400, f"{field}: {message}", "invalid_value", field)


class CancelledError(Exception):
    """Raised in a generation whose client has disconnected."""


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an answer that is an error."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # `type` is Anthropic's, whose clients read the same error.
    return {"type": "error", "error": {"message": message, "type": kind, "param": param, "code": code}}


def server_error(error: BaseException, where: str) -> ApiError:
    """Log an error that is not the client's, and return the ApiError that takes its place: its message may contain
    other users' data.
    """
    logger.error("%s failed", where, exc_info=error)
    return ApiError(500, "internal server error; see the server log", "internal_error")


def client_error(error: Exception, where: str) -> ApiError:
    """Return an error as its client may see it."""
    return error if isinstance(error, ApiError) else server_error(error, where)


def failure(error: Exception) -> dict[str, Any]:
    """Return the body of an error event of a stream."""
    shown = client_error(error, "a generation")
    return error_body(shown.status_code, shown.detail, shown.code, shown.param)


def field_and_message(errors: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return the field and the message of what pydantic found; the field is empty where there is no body."""
    # A value may be of several kinds: the error found deepest, rather in a value than in its kind, is about the kind
    # that it was meant to be.
    found = max(errors, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    field = ".".join(str(part)[:_SHOWN] for part in found["loc"] if part != "body" and not _is_kind(part))
    message = found["msg"].removeprefix("Value error, ")
    shows = found["type"] not in ("missing", "extra_forbidden", "json_invalid", "value_error")
    return field, f"{message}, got {_shown(found['input'])}" if shows else message


def _is_kind(part: Any) -> bool:
    """Whether a part of a place names one of the kinds that a value may be of, rather than a field or a number."""
    return isinstance(part, str) and (part in _KIND_NAMES or not re.fullmatch(r"\w+", part))


def _shown(value: Any) -> str:
    """A value as JSON has it, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def add_error_handlers(app: FastAPI) -> None:
    """Gives every error that leaves the app OpenAI's form."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        if unread(error):
            error = _unreadable()
        code, param = getattr(error, "code", None), getattr(error, "param", None)
        body = error_body(error.status_code, str(error.detail), code, param)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        field, message = field_and_message(error.errors())
        return await refused(request, invalid(field, message) if field else _unreadable())

    @app.exception_handler(CancelledError)
    async def left(request: Request, error: CancelledError) -> Response:
        return Response(status_code=499)  # nobody reads it

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return await refused(request, server_error(error, request.url.path))
