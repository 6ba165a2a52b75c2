"""Numbers of JSON schemas as llguidance holds them exactly: it computes in float64, and keeps a state of its lexer for
each remainder of a division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, NamedTuple

from .json_values import DIGITS, is_number

LARGEST = 2**63 - 1024
"""The largest float64 that is an int64, as which llguidance reads whole bounds; it has no least one. It reads no other
bounds beyond it, so that numbers whose limits are have these instead.
"""
INTEGERS = {
    "int64": (-LARGEST, LARGEST),
    "uint64": (0, LARGEST),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
}
"""The least and the largest number of formats of integers (OpenAPI's registry), as far as llguidance can tell."""
_MAX_REMAINDERS = 10_000
_MAX_MULTIPLES = 1_000
"""Most multiples that are listed."""
LARGEST_MULTIPLE = 2**48
"""Largest number that is written as a multiple of a fraction: float64 keeps five binary places of it, which is as many
as a step of `_MAX_REMAINDERS` has.
"""
TOO_LARGE = 2**63
"""Least of the limits that llguidance does not read."""
EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
LOWER = ("minimum", "exclusiveMinimum")


class Limit(NamedTuple):
    """A limit of numbers on one side."""

    value: float
    exclusive: bool


def says_how_a_limit_is_meant(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether a keyword is draft 4's boolean, which says whether the limit of another keyword is exclusive."""
    return keyword in EXCLUSIVE.values() and isinstance(schema.get(keyword), bool)


def limit_of(keyword: str, schema: Mapping[str, Any]) -> Limit | None:
    """Return the limit that a keyword of a schema sets; None if it sets none."""
    value: Any = schema.get(keyword)
    if not is_number(value):
        return None
    return Limit(value, exclusive=keyword not in EXCLUSIVE or schema.get(EXCLUSIVE[keyword]) is True)


def inclusive(limit: Limit, upward: bool, whole: bool) -> float:
    """Return a limit that numbers may reach for one that they may not where it is exclusive.

    It is no weaker, and has `DIGITS` digits: llguidance loses those of a limit after them, and a reader of an output as
    float64 those of its numbers. `upward`: whether it is a least value; `whole`: whether the numbers are integers.
    """
    value, exclusive = limit
    if whole:
        nearest = math.ceil(value) if upward else math.floor(value)
        if exclusive and nearest == value:
            nearest += 1 if upward else -1
        return int(_float64(nearest, upward))
    decimal = Decimal(value) if isinstance(value, int) else Decimal(repr(value))
    step = Decimal(1).scaleb(max(decimal.adjusted() - DIGITS + 1, -DIGITS))
    rounded = decimal.quantize(step, ROUND_CEILING if upward else ROUND_FLOOR)
    if exclusive and rounded == decimal:
        rounded += step if upward else -step
    return int(rounded) if rounded == rounded.to_integral_value() else float(rounded)


def within(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of numbers with `minimum`, `maximum` and `multipleOf`.

    llguidance 1.9.1 leaves out the numbers whose decimals a limit begins with, such as 0.7 below 0.75: they are listed.
    Multiples are written with as many decimals as their step, or none, so that 0.5 is one of 0.5 and not of 0.25.
    """
    least, most = keywords.get("minimum", -math.inf), keywords.get("maximum", math.inf)
    step = keywords.get("multipleOf")
    left_out = [
        number
        for limit in dict.fromkeys((least, most))
        for number in _shorter(limit)
        if least <= number <= most and (step is None or _is_multiple(number, step))
    ]
    steps = [{}] if step is None else [{"multipleOf": one} for one in (step, *_coarser(step))]
    options: list[dict[str, Any]] = [{"type": "number", **keywords, **one} for one in steps]
    options += [{"enum": left_out}] if left_out else []
    return {"anyOf": options} if len(options) > 1 else options[0]


def _coarser(step: float) -> list[float]:
    """Return the steps of the multiples of a step that have fewer decimals, but one at least."""
    decimals = -int(Decimal(repr(step)).normalize().as_tuple().exponent)
    units = int(Decimal(repr(step)).scaleb(max(decimals, 0)))
    return [math.lcm(units, 10**fewer) / 10**decimals for fewer in range(1, decimals)]


def _shorter(limit: float) -> list[float]:
    """Return the numbers whose decimals a limit begins with."""
    if isinstance(limit, int) or limit.is_integer() or math.isinf(limit):
        return []
    whole, _, decimals = format(Decimal(repr(limit)), "f").partition(".")
    return [*dict.fromkeys(float(f"{whole}.{decimals[:end]}") for end in range(1, len(decimals)))]


def _float64(value: int, upward: bool) -> float:
    """Return the next number of float64 that is no weaker a limit."""
    nearest = float(value)
    if upward and nearest < value:
        return math.nextafter(nearest, math.inf)
    if not upward and nearest > value:
        return math.nextafter(nearest, -math.inf)
    return nearest


def inexact(step: float) -> str | None:
    """Say why a number may be a multiple of `step` and not found to be one, or return None."""
    if Decimal(repr(step)) == Decimal(step):
        return None
    return f"{step} has no exact float64, in which most validators divide: to them some multiples are none"


def multiples(step: float, least: float, most: float, whole: bool) -> list[float] | None:
    """Return the multiples of `step` within limits that are multiples in float64 too; None if there are many."""
    exact = Decimal(repr(step))
    first, last = (Decimal(repr(limit)) / exact for limit in (least, most))
    if not last - first <= _MAX_MULTIPLES:
        return None
    numbers = [exact * count for count in range(math.ceil(first), math.floor(last) + 1)]
    written = [int(number) if number == int(number) else float(number) for number in numbers]
    return [number for number in written if _is_multiple(number, step) and not (whole and isinstance(number, float))]


def _is_multiple(number: float, step: float) -> bool:
    """Whether a number is a multiple, exactly and in float64."""
    return not Decimal(repr(number)) % Decimal(repr(step)) and number / step % 1 == 0


def too_many_remainders(step: float) -> str | None:
    """Say why numbers cannot be held to multiples of `step`, or return None: each remainder is a state of the lexer,
    of which sequences share a limited number.
    """
    decimal = Decimal(repr(step))
    places = max(0, -int(decimal.normalize().as_tuple().exponent))
    if decimal.scaleb(places) <= _MAX_REMAINDERS:
        return None
    return f"{step} is not supported, since numbers would have more than {_MAX_REMAINDERS:,} remainders"
