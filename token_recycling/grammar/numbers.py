"""Numbers of JSON schemas as llguidance holds them exactly: it computes in float64, and keeps a state of its lexer for
each remainder of a division.
"""

from __future__ import annotations

import math
from decimal import Decimal

_LARGEST = 2**63 - 1024
"""The largest float64 that is an int64, as which llguidance reads whole bounds; it has no least one."""
INTEGERS = {
    "int64": (-_LARGEST, _LARGEST),
    "uint64": (0, _LARGEST),
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32)},
}
"""The least and the largest number of formats of integers (OpenAPI's registry), as far as llguidance can tell."""
_MAX_REMAINDERS = 10_000
_LEAST_STEP = 1e-9
"""How much farther from zero than a whole exclusive bound a number must be."""


def rounded(value: float, upward: bool) -> float:
    """Return a bound that float64 can express, no weaker than `value`, and a whole one as an integer: llguidance reads
    the float next to 2**63 as that.
    """
    nearest = float(value)
    if upward and nearest < value:
        nearest = math.nextafter(nearest, math.inf)
    elif not upward and nearest > value:
        nearest = math.nextafter(nearest, -math.inf)
    return int(nearest) if nearest.is_integer() and abs(nearest) < 2**63 else nearest


def inclusive(bounds: dict[str, float]) -> dict[str, float]:
    """Return bounds with a whole exclusive one that faces away from zero as an inclusive one just beyond it: llguidance
    admits 1 for `{"exclusiveMinimum": 1, "maximum": 1.5}`, and -1 for its mirror image.
    """
    for exclusive, name, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        whole = bounds.get(exclusive)
        if whole is not None and whole == int(whole) and sign * whole >= 0:
            beyond = abs(whole) + max(_LEAST_STEP, math.ulp(whole))
            rest = {key: value for key, value in bounds.items() if key != exclusive}
            return {**rest, name: sign * max(beyond, sign * bounds.get(name, whole))}
    return bounds


def too_many_remainders(step: float) -> str | None:
    """Say why numbers cannot be held to multiples of `step`, or return None: each remainder is a state of the lexer,
    of which sequences share a limited number.
    """
    decimal = Decimal(repr(step))
    places = max(0, -int(decimal.normalize().as_tuple().exponent))
    if decimal.scaleb(places) <= _MAX_REMAINDERS:
        return None
    return f"{step} is not supported, since numbers would have more than {_MAX_REMAINDERS:,} remainders"
