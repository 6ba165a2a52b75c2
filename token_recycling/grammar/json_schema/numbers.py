"""Numbers of JSON schemas that llguidance enforces exactly: it computes in float64, and has a lexer state for each
remainder of a division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any, NamedTuple

from .json_values import DIGITS, is_number

LARGEST = 2**63 - 1024
"""The largest float64 that is an int64. llguidance reads integer bounds as int64 and cannot read bounds beyond it, so
weaker limits are replaced by plus or minus this number.
"""
INTEGERS = {
    "int64": (-LARGEST, LARGEST),
    "uint64": (0, LARGEST),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
}
"""The range of each integer format (OpenAPI's registry), as far as llguidance can represent it."""
_MAX_REMAINDERS = 10_000
_MAX_MULTIPLES = 1_000
"""Maximum number of multiples that are listed."""
LARGEST_MULTIPLE = 2**48
"""Largest multiple of a fraction: float64 keeps five binary places of it, as many as a step of `_MAX_REMAINDERS`."""
TOO_LARGE = 2**63
"""The smallest limit that llguidance cannot read."""
EXCLUSIVE = {"minimum": "exclusiveMinimum", "maximum": "exclusiveMaximum"}
LOWER = ("minimum", "exclusiveMinimum")


class Limit(NamedTuple):
    """A lower or upper limit."""

    value: float
    exclusive: bool


def is_exclusive_flag(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a keyword is draft 4's boolean that makes the limit of another keyword exclusive."""
    return keyword in EXCLUSIVE.values() and isinstance(schema.get(keyword), bool)


def limit_of(keyword: str, schema: Mapping[str, Any]) -> Limit | None:
    """Return the limit that a keyword of a schema sets, or None."""
    value: Any = schema.get(keyword)
    if not is_number(value):
        return None
    return Limit(value, exclusive=keyword not in EXCLUSIVE or schema.get(EXCLUSIVE[keyword]) is True)


def inclusive(limit: Limit, upward: bool, whole: bool) -> float:
    """Return an inclusive limit for a limit that may be exclusive.

    The result is no weaker, and has at most `DIGITS` digits: llguidance loses further digits of a limit, and a float64
    reader loses further digits of an output. `upward`: whether it is a lower limit; `whole`: whether the numbers are
    integers.
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

    llguidance 1.9.1 misses numbers that are decimal prefixes of a limit, such as 0.7 below 0.75, so they are listed. It
    writes multiples with as many decimals as the step, or none, so that 0.5 is a multiple of 0.5 but not of 0.25;
    coarser steps are added.
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
    """Return the steps whose multiples are the multiples of `step` with fewer decimals, but at least one."""
    decimals = -int(Decimal(repr(step)).normalize().as_tuple().exponent)
    units = int(Decimal(repr(step)).scaleb(max(decimals, 0)))
    return [math.lcm(units, 10**fewer) / 10**decimals for fewer in range(1, decimals)]


def _shorter(limit: float) -> list[float]:
    """Return the shorter numbers that are decimal prefixes of a limit."""
    if isinstance(limit, int) or limit.is_integer() or math.isinf(limit):
        return []
    whole, _, decimals = format(Decimal(repr(limit)), "f").partition(".")
    return [*dict.fromkeys(float(f"{whole}.{decimals[:end]}") for end in range(1, len(decimals)))]


def _float64(value: int, upward: bool) -> float:
    """Return the nearest float64 that is no weaker as a limit."""
    nearest = float(value)
    if upward and nearest < value:
        return math.nextafter(nearest, math.inf)
    if not upward and nearest > value:
        return math.nextafter(nearest, -math.inf)
    return nearest


def inexact(step: float) -> str | None:
    """Return why validators may not recognize a multiple of `step`, or None."""
    if Decimal(repr(step)) == Decimal(step):
        return None
    return f"{step} has no exact float64, in which most validators divide: they reject some multiples"


def multiples(step: float, least: float, most: float, whole: bool) -> list[float] | None:
    """Return the multiples of `step` within limits that are also multiples in float64; None if there are too many."""
    exact = Decimal(repr(step))
    first, last = (Decimal(repr(limit)) / exact for limit in (least, most))
    if not last - first <= _MAX_MULTIPLES:
        return None
    numbers = [exact * count for count in range(math.ceil(first), math.floor(last) + 1)]
    written = [int(number) if number == int(number) else float(number) for number in numbers]
    return [number for number in written if _is_multiple(number, step) and not (whole and isinstance(number, float))]


def _is_multiple(number: float, step: float) -> bool:
    """Return whether a number is a multiple, both exactly and in float64."""
    return not Decimal(repr(number)) % Decimal(repr(step)) and number / step % 1 == 0


def too_many_remainders(step: float) -> str | None:
    """Return why multiples of `step` cannot be enforced, or None. Each remainder is a lexer state, and the number of
    states is limited.
    """
    decimal = Decimal(repr(step))
    places = max(0, -int(decimal.normalize().as_tuple().exponent))
    if decimal.scaleb(places) <= _MAX_REMAINDERS:
        return None
    return f"{step} is not supported: division by it has more than {_MAX_REMAINDERS:,} remainders"
