"""What JSON can say and neither templates nor UTF-8 can take."""

from __future__ import annotations

import math
from typing import Any

from .errors import invalid

_DEEPEST = 100
"""Values within values in a field: templates that write them as JSON call themselves for each."""


def check_json(name: str, value: Any) -> None:
    """Raises ApiError for a field with values within values that templates cannot take, or with half a character."""
    below = [(name, 0), (value, 0)]
    while below:
        one, depth = below.pop()
        if depth > _DEEPEST:
            raise invalid(name, f"expected values within values, {_DEEPEST} at most, got more")
        if isinstance(one, float) and not math.isfinite(one):
            raise invalid(name, f"expected numbers that JSON has, got {one}")
        if isinstance(one, str) and not _whole(one):
            shown = name.encode("ascii", "backslashreplace").decode()
            raise invalid(shown, "expected text in Unicode, got half of a surrogate pair; leave it out")
        if isinstance(one, dict):
            below += [(inner, depth + 1) for pair in one.items() for inner in pair]
        elif isinstance(one, list):
            below += [(inner, depth + 1) for inner in one]


def _whole(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
