"""A server that speaks OpenAI's and Anthropic's APIs, with an accelerated model. Its dependencies are the extra
`serving`.

A request passes through its route (`app`), its validation (`protocol`) and its API (`api`). The API module converts the
request into generations and formats their deltas. The `engine` runs generations in threads; `output` parses their
tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._util.extras import lacking

if TYPE_CHECKING:
    from .app import create_app
    from .http_server import HttpServer
    from .keys import parse_keys
    from .settings import Isolation

__all__ = ["HttpServer", "Isolation", "check_installed", "create_app", "parse_keys"]

_HOMES = {
    "create_app": "app",
    "HttpServer": "http_server",
    "Isolation": "settings",
    "parse_keys": "keys",
}


def check_installed() -> None:
    """Raise ValueError if a package of the extra `serving` is missing; the message says how to install it."""
    if missing := lacking(
        "serving", "fastapi", "uvicorn", "sse_starlette", "prometheus_client", "jinja2", "llguidance"
    ):
        raise ValueError(f"serving {missing}")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    check_installed()
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
