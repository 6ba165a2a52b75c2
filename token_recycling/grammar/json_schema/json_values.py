"""Types and equality of JSON values as defined by JSON Schema, and places in a document."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

Schema = dict[str, Any] | bool
TYPES = ("null", "boolean", "number", "integer", "string", "array", "object")
"""The names of types in schemas. In a set of types, `number` stands for non-integers."""
LARGEST = 2**53
"""Numbers beyond it lose digits in llguidance, which computes in float64."""
DIGITS = 15
"""Decimal digits that every float64 preserves; llguidance 1.9.1 loses further digits."""


def kind_of(value: Any) -> str:
    """Return the type of a value; `number` for integers."""
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return names.get(type(value), "null")


def types_named(names: Iterable[Any]) -> set[str]:
    """Return the types of values that a `type` keyword admits: an integer is also a number."""
    named = {name for name in names if isinstance(name, str)}
    return named | {"integer"} if "number" in named else named


def type_of(value: Any) -> str:
    """Return the type of a value, as used in sets of types."""
    kind = kind_of(value)
    return "integer" if kind == "number" and _finite(value) and value == int(value) else kind


def equal(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; 1 and true differ."""
    if kind_of(one) != kind_of(other):
        return False
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return bool(one == other)


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)


def is_count(value: Any) -> bool:
    """Return whether a value is a valid number of characters, items or properties."""
    return is_number(value) and value >= 0 and value == int(value) and value < 2**32


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def why_inexact(value: Any) -> str | None:
    """Return why a value cannot be expressed exactly; None if it can."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part
        elif isinstance(part, str):
            bad = next((character for character in part if character < " " and character not in "\b\t\n\f\r"), None)
            if bad is not None or "\x7f" in part or any("\ud800" <= character <= "\udfff" for character in part):
                return f"{shown(part)} has control characters or lone surrogates"
        elif is_number(part) and (abs(part) > LARGEST or _digits(part) > DIGITS):
            return f"{shown(part)} has too many digits: the limit is 2**53 for integers, {DIGITS} digits for others"
        elif isinstance(part, int | float) and not isinstance(part, bool) and not _finite(part):
            return f"{shown(part)} is not a JSON number"
    return None


def _digits(value: float) -> int:
    """Return the number of significant digits of a float; 0 for an integer, which loses none."""
    return 0 if isinstance(value, int) else len(Decimal(repr(value)).as_tuple().digits)


def strings(value: Any) -> list[str]:
    """Return the strings in a list; an empty list for other values."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def at_pointer(document: Any, place: str) -> Any:
    """Return the value at a JSON pointer; None if there is none."""
    value = document
    for part in place.split("/")[1:]:
        name = unescaped(part)
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def escaped(name: str) -> str:
    """Return a name, escaped for a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescaped(part: str) -> str:
    """Return the name of an escaped part of a JSON pointer."""
    return part.replace("~1", "/").replace("~0", "~")


def shown(value: Any) -> str:
    """Return a value for a message, truncated."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
