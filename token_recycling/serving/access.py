"""Which API key a request carries, as FastAPI dependencies: `User` for clients, `MetricsUser` for /metrics."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from .errors import ApiError
from .keys import METRICS, Key, find_key


async def _client_key(request: Request) -> Key | None:
    """The API key of a client, None where no keys are configured; raises ApiError."""
    keys, key = _keys(request)
    if keys and (key is None or key.name == METRICS):
        raise _unauthorized("an API key of this server, as `Authorization: Bearer KEY`")
    return key


async def _metrics_key(request: Request) -> Key | None:
    """The key for /metrics, since totals reveal something about other users; raises ApiError."""
    keys, key = _keys(request)
    if keys and (key is None or key.name != METRICS):
        raise _unauthorized(f"the API key with the name {METRICS!r}")
    return key


def _keys(request: Request) -> tuple[tuple[Key, ...], Key | None]:
    """The configured keys, and the one of them that the request carries."""
    keys = request.app.state.service.settings.keys
    return keys, find_key(keys, request.headers.get("authorization"))


def _unauthorized(expected: str) -> ApiError:
    message = f"expected {expected}, got none or another one"
    return ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


User = Annotated[Key | None, Depends(_client_key)]
"""Parameter of a route that needs an API key, where keys are configured."""
MetricsUser = Annotated[Key | None, Depends(_metrics_key)]
"""Parameter of a route that only the key named `metrics` opens, where keys are configured."""
