"""Errors in the format of OpenAI's API: a status, and a body that its clients turn into an exception."""

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
"""Maximum characters of a value that an error message repeats."""
_LONGEST_MESSAGE = 300
"""Maximum characters of a message: errors of grammars and chat templates may repeat the request."""
_LONGEST_SUBJECT, _MOST_SUBJECTS = 80, 200
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


_DETAILS = {"thread": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
"""Details of an unsupported field: Anthropic's tool runner repeats a request that is refused so, without the field."""


class WarnOnce:
    """Logs a warning once per subject. Clients choose the subjects, so their number and length are limited."""

    def __init__(self, message: str) -> None:
        """`message` has one %s, for the subject."""
        self._message, self._subjects = message, set[str]()

    def __call__(self, subject: str, detail: str = "") -> None:
        """Warn about a subject. The log message shows `detail` instead of the subject if it is not empty."""
        escaped = ascii(subject)[1:-1][:_LONGEST_SUBJECT]
        if escaped not in self._subjects and len(self._subjects) < _MOST_SUBJECTS:
            self._subjects.add(escaped)
            logger.warning(self._message, ascii(detail)[1:-1] if detail else escaped)


warn_ignored = WarnOnce("%s is not supported and is ignored")


class ApiError(HTTPException):
    """An error for the client: a status, a sentence, and a machine-readable code."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        cut = message if len(message) <= _LONGEST_MESSAGE else f"{message[: _LONGEST_MESSAGE - 1]}…"
        super().__init__(status, cut, headers)
        self.code, self.param = code, param

    def __str__(self) -> str:
        return self.detail

    def renamed(self, field: str, name: str) -> ApiError:
        """Return this error, with `field` replaced by `name` if the error is about that field."""
        if self.param == field:
            self.param = name
            self.detail = re.sub(f"^{field}: ", f"{name}: ", self.detail)
        return self


def _unreadable() -> ApiError:
    return ApiError(400, _UNREADABLE, "invalid_body")


def _no_route(request: Request, error: HTTPException) -> ApiError:
    """Return the error for a path or method without a route. Most wrong base URLs lack /v1 or contain it twice."""
    asked = f"{request.method} {shown(request.url.path)}"
    message = f"{asked} does not exist; the APIs are under /v1, such as POST /v1/chat/completions"
    return ApiError(error.status_code, message, "not_found", headers=error.headers)


def unread(error: HTTPException) -> bool:
    """Return whether the server's framework failed to read a body."""
    return error.status_code == 400 and not isinstance(error, ApiError)


def invalid(field: str, message: str) -> ApiError:
    """Return the error for a request field with an invalid value."""
    return ApiError(400, f"{field}: {message}", "invalid_value", field)


class CancelledError(Exception):
    """Raised in a generation whose client has disconnected."""


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return the body of an error response."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if code == "unsupported" and param in _DETAILS:
        error["details"] = _DETAILS[param]
    # Anthropic's clients read the same body and need the outer `type`.
    return {"type": "error", "error": error}


def server_error(error: BaseException, where: str) -> ApiError:
    """Log an error that the client did not cause, and return an ApiError without details: the original message may
    contain other users' data.
    """
    logger.error("%s failed", where, exc_info=error)
    return ApiError(500, "internal server error; see the server log", "internal_error")


def client_error(error: Exception, where: str) -> ApiError:
    """Return the error that the client may see."""
    return error if isinstance(error, ApiError) else server_error(error, where)


def failure(error: Exception) -> dict[str, Any]:
    """Return the body of an error event of a stream."""
    shown = client_error(error, "a generation")
    return error_body(shown.status_code, shown.detail, shown.code, shown.param)


_KINDS_OF_VALUES = {
    "string_type": "a string",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    "list_type": "a list",
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "an object"),
}
"""The required kind of value, by pydantic's error type."""


def refusal(errors: Sequence[Mapping[str, Any]], body: Any) -> ApiError:
    """Return one error for all the errors that pydantic found in a body.

    For a value that may be of several kinds, pydantic lists an error per kind. The most deeply nested error belongs to
    the kind that the client meant. Among errors in the same place, a violated limit implies that the kind is right. If
    there is none, the returned error lists all kinds.
    """
    places = [_place(error, body) for error in errors]
    deepest = max(places, key=len)
    if not deepest:
        return _unreadable()
    there = [error for error, place in zip(errors, places, strict=True) if place == deepest]
    others = [error for error in there if _allowed(error) is None]
    if others:
        message = _message(others[0])
    else:
        allowed = dict.fromkeys(filter(None, map(_allowed, there)))
        message = f"must be {' or '.join(allowed)}, got {shown(there[0]['input'])}"
    return invalid(".".join(str(part)[:_SHOWN] for part in deepest), message)


def _place(error: Mapping[str, Any], body: Any) -> list[str | int]:
    """Return the keys and indices that lead to an error in the body. Pydantic's `loc` interleaves them with names of
    kinds, which are dropped here.
    """
    value, place, missing = body, [], error["loc"][-1:] if error["type"] == "missing" else ()
    for part in error["loc"][: len(error["loc"]) - len(missing)]:
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            place.append(part)
            value = value[part]
    return [*place, *missing]


def _allowed(error: Mapping[str, Any]) -> str | None:
    """Return the required kind of a value of the wrong kind; None for other errors."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return _KINDS_OF_VALUES.get(error["type"])


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "value_error":
        return str(error["msg"]).removeprefix("Value error, ")
    limit = re.sub(r"^\w+ should", "must", re.sub(r" after validation, not \d+$", "", error["msg"]))
    return f"{limit}, got {shown(error['input'])}"


def shown(value: Any) -> str:
    """Return a value as JSON, truncated."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def add_error_handlers(app: FastAPI) -> None:
    """Add handlers that convert all errors of the app to OpenAI's format."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        if unread(error):
            error = _unreadable()
        elif error.status_code in (404, 405) and not isinstance(error, ApiError):
            error = _no_route(request, error)
        code, param = getattr(error, "code", None), getattr(error, "param", None)
        body = error_body(error.status_code, str(error.detail), code, param)
        return JSONResponse(body, error.status_code, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        within = [{**detail, "loc": detail["loc"][1:]} for detail in error.errors()]  # locations begin with "body"
        return await refused(request, refusal(within, error.body))

    @app.exception_handler(CancelledError)
    async def left(request: Request, error: CancelledError) -> Response:
        return Response(status_code=499)  # the client has disconnected

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return await refused(request, server_error(error, request.url.path))
