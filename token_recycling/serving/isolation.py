"""Isolation: whose texts a drafter may learn from, and the default for an address and its keys."""

from __future__ import annotations

import ipaddress
from enum import Enum


class Isolation(str, Enum):
    """Who shares a drafter."""

    shared = "shared"
    """All requests."""
    per_key = "per-key"
    """The requests of one API key."""
    per_request = "per-request"
    """None: every request begins with a copy of the base, which is dropped afterwards."""


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
