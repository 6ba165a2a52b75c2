"""How a model is served, checked when it is stated, and whose texts a drafter may learn from by default."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .._util.options import check_above, check_at_least
from .keys import METRICS, Key

DEFAULT_OFFERS = ("recycling", "published", "suffix", "prompt_lookup", "lookahead")
"""Drafters that requests for steps may name where the operator lists none."""


class Isolation(str, Enum):
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
    """What clients call the model."""
    drafter: str = "recycling"
    offers: tuple[str, ...] = DEFAULT_OFFERS
    """Drafters that a request for steps may name instead, made for that request."""
    free_options: bool = False
    """Such a request may change the options of the drafter: for a server with one user."""
    matrix: Path | None = None
    """Loaded at start if it is there; the base of all drafters, and, where one is shared, where it is saved."""
    save_every: float = 60.0
    """Seconds between two saves of what changed."""
    isolation: Isolation = Isolation.shared
    """May be given as its value, such as "per-key"."""
    keys: tuple[Key, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    """Names beside those of this machine to which a loopback address answers where no keys are configured."""
    max_keys: int = 64
    """Matrices of keys in memory at most; the least recently used makes room."""
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    concurrency: int = 1
    """Texts that are generated at once."""
    max_requests: int = 32
    """Running and waiting."""
    max_requests_per_key: int | None = None
    max_body: float = 2.0
    """Megabytes of a request's body at most."""
    timeout: float | None = None
    """Seconds from the arrival of a request to its last token at most."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "isolation", Isolation(self.isolation))
        check_at_least(1, self, "concurrency", "max_keys", "max_prompt_tokens", "max_new_tokens")
        check_at_least(1, self, "max_requests", "max_requests_per_key")
        check_above(0, self, "save_every", "max_body", "timeout")
        users = [key for key in self.keys if key.name != METRICS]
        if self.isolation is Isolation.per_key and not users:
            raise ValueError("expected an API key for isolation per-key, got none; give one, or another isolation")


def default_isolation(host: str, has_keys: bool) -> tuple[Isolation, str]:
    """The default isolation, and the reason for it."""
    if has_keys:
        return Isolation.per_key, "since API keys are configured"
    if is_loopback(host):
        return Isolation.shared, f"since {host} is reached from this machine alone, and no API keys are configured"
    return Isolation.per_request, f"since {host} is reached from elsewhere, and no API keys are configured"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
