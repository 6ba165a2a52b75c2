"""How a model is served, checked when it is stated, and whose texts a drafter may learn from by default."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Literal

from .._util.network import is_loopback
from .._util.options import check_declared, option
from .keys import METRICS, Key

_limit = partial(option, rich_help_panel="Limits")
DEFAULT_OFFERS = ("recycling", "published", "suffix", "prompt_lookup", "lookahead")
"""Drafters that requests for steps may name where the operator lists none."""


class Isolation(StrEnum):
    """Who shares a drafter."""

    shared = "shared"
    """All requests."""
    per_key = "per-key"
    """The requests of one API key."""
    per_request = "per-request"
    """None: every request begins with a copy of the base, which is dropped afterwards."""


@dataclass(frozen=True)
class Settings:
    """How a model is served: the options of `token-recycling serve`."""

    name: str = "model"
    """Model name that clients send."""
    aliases: tuple[str, ...] = ()
    """Further names for the model."""
    drafter: str = "recycling"
    offers: tuple[str, ...] = DEFAULT_OFFERS
    """Drafters that a request for steps may name instead, made for that request."""
    matrix: Path | None = option(  # noqa: RUF009  # a field, as the others
        None,
        "Matrix file, loaded if it exists and saved with isolation shared; otherwise read-only, the start of each "
        "key's or request's own.",
        rich_help_panel="Learning",
    )
    save_every: float = option(60.0, "Seconds between saves.", 0.001, rich_help_panel="Learning")
    isolation: Isolation = Isolation.shared
    """May be given as its value, such as "per-key"."""
    isolate_forwarded: bool = True
    """Without API keys, a request that a proxy forwarded is isolated where those of this machine are shared."""
    reproducible: bool = option(
        False,
        "Give equal requests equal outputs in 16 bits too: every request starts with a new drafter, and nothing is "
        "cached.",
        rich_help_panel="Learning",
    )
    keys: tuple[Key, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    """Host names to accept in addition to those of this machine, without API keys."""
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server from a browser; `*` is any."""
    max_prompt_tokens: int | None = _limit(None, "Maximum prompt tokens; default the model's context.", 1)
    max_new_tokens: int | None = _limit(None, "Maximum output tokens; default the model's context.", 1)
    fast: Literal["auto", "on", "off"] = option(
        "auto",
        "Capture forward passes as CUDA graphs: auto where possible on CUDA, on or an error, off never.",
    )
    concurrency: int | None = _limit(
        None, "Maximum number of sequences decoded in one batch; default 4 where they fit in memory, else fewer.", 1
    )
    cache: float | None = _limit(
        None, "Size of the prefix cache in megabytes; default an eighth of free memory, 0 disables it.", 0
    )
    max_requests: int = _limit(32, "Maximum running plus queued requests; further ones get 503.", 1)
    max_requests_per_key: int | None = _limit(None, "The same per API key; further ones get 429.", 1)
    max_body: float = _limit(2.0, "Maximum size of a request body in megabytes.", 0.001)
    timeout: float | None = _limit(None, "Maximum seconds per request, queueing included.", 0.001)
    max_connections: int = _limit(512, "Maximum open connections; further ones get 503.", 1)
    grace: float = _limit(10.0, "Seconds to let in-flight requests finish at shutdown; new ones get 503.", 0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "isolation", Isolation(self.isolation))
        check_declared(self)
        users = [key for key in self.keys if key.name != METRICS]
        if self.isolation is Isolation.per_key and not users:
            raise ValueError("isolation per-key needs an API key, got none; add a key or choose another isolation")
        if self.reproducible and (got := ", ".join(self._across_requests())):
            raise ValueError(
                f"reproducible cannot be combined with {got}, by which one request changes another; omit one of them"
            )

    def _across_requests(self) -> Iterator[str]:
        """The settings by which one request can change another's text."""
        if self.isolation is not Isolation.per_request:
            yield f"isolation {self.isolation.value}"
        if self.concurrency is not None and self.concurrency > 1:
            yield f"a concurrency of {self.concurrency}"
        if self.matrix is not None:
            yield "a matrix"
        if self.cache:
            yield f"a cache of {self.cache:g} MB"


def default_isolation(host: str, has_keys: bool, reproducible: bool = False) -> tuple[Isolation, str]:
    """The default isolation, and the reason for it."""
    if reproducible:
        return Isolation.per_request, "since equal requests are to give equal texts"
    if has_keys:
        return Isolation.per_key, "since API keys are configured"
    if is_loopback(host):
        return Isolation.shared, f"since {host} is reached from this machine alone, and no API keys are configured"
    return Isolation.per_request, f"since {host} is reached from elsewhere, and no API keys are configured"
