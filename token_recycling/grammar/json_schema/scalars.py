"""Keywords about types, constants, numbers and strings."""

from __future__ import annotations

import math
from typing import Any

from .complement import either
from .formats import FORMATS
from .json_values import TYPES, is_number, shown, why_inexact
from .lookahead import conjuncts
from .numbers import (
    EXCLUSIVE,
    INTEGERS,
    LARGEST,
    LARGEST_MULTIPLE,
    LOWER,
    TOO_LARGE,
    Limit,
    inclusive,
    inexact,
    is_exclusive_flag,
    limit_of,
    multiples,
    too_many_remainders,
    within,
)
from .walk import Node


def express(node: Node) -> None:
    """Express the keywords about types, constants, numbers and strings."""
    _type(node)
    _const(node)
    _enum(node)
    if node.kinds & {"number", "integer"}:
        _limit(node, "minimum")
        _limit(node, "maximum")
        _multiple_of(node)
        _range(node)
    if "string" in node.kinds:
        _lengths(node)
        _pattern(node)
        _format(node)


def _type(node: Node) -> None:
    if "type" not in node.schema:
        return
    kinds = node.schema["type"]
    named = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(named, list) or not named or not all(kind in TYPES for kind in named):
        node.note("type", f"must be one of {', '.join(TYPES)}, or a list of them, got {shown(kinds)}", mistaken=True)
        return
    node.kinds = {*named}
    if "number" in node.kinds:
        node.kinds.discard("integer")
    names = [name for name in dict.fromkeys(named) if name in node.kinds]
    node.own["type"] = names[0] if len(names) == 1 else names


def _const(node: Node) -> None:
    if "const" in node.schema:
        if (why := why_inexact(node.schema["const"])) is None:
            node.own["const"] = node.schema["const"]
        else:
            node.note("const", why)


def _enum(node: Node) -> None:
    values = node.get("enum", lambda value: isinstance(value, list), "a list")
    if values is not None:
        reasons = [why for value in values if (why := why_inexact(value)) is not None]
        if reasons:
            node.note("enum", reasons[0])
        else:
            node.own["enum"] = values


# Numbers


def _limit(node: Node, name: str) -> None:
    """Express the limits on one side, `minimum` or `maximum`, by the strictest one."""
    upward, whole = name in LOWER, "number" not in node.kinds
    limits = list[float]()
    for keyword in (EXCLUSIVE[name], name):
        if is_exclusive_flag(keyword, node.schema):
            continue
        node.get(keyword, is_number, "a number")
        if (limit := limit_of(keyword, node.schema)) is not None:
            value = inclusive(limit, upward, whole)
            value = max(value, -LARGEST) if upward else min(value, LARGEST)
            if (value if upward else -value) < TOO_LARGE:
                limits.append(value)
            else:
                node.note(keyword, f"{shown(limit.value)} is beyond 2**63")
    if node.kinds & {"integer", "number", "string"} == {"integer"}:
        least_and_most = INTEGERS.get(str(node.schema.get("format")))
        if least_and_most is not None:
            limits.append(inclusive(Limit(least_and_most[not upward], exclusive=False), upward, whole))
    if limits:
        node.own[name] = max(limits) if upward else min(limits)


def _multiple_of(node: Node) -> None:
    step = node.get("multipleOf", lambda value: is_number(value) and value > 0, "a number above 0")
    if step is None:
        return
    own, whole = node.own, "number" not in node.kinds
    why = why_inexact(step) or too_many_remainders(step) or inexact(step)
    listed = multiples(step, own.get("minimum", -math.inf), own.get("maximum", math.inf), whole) if why else None
    if listed is not None and why_inexact(listed) is None:
        node.others.append(either([{"enum": listed}, *node.of_other_types("number", "integer")]))
        return
    if why is not None:
        node.note("multipleOf", why)
    if why is None or why == inexact(step):
        own["multipleOf"] = step
        if not whole or isinstance(step, float):
            own["minimum"] = max(own.get("minimum", -LARGEST_MULTIPLE), -LARGEST_MULTIPLE)
            own["maximum"] = min(own.get("maximum", LARGEST_MULTIPLE), LARGEST_MULTIPLE)


def _range(node: Node) -> None:
    """Express the limits of non-integers by alternatives, if llguidance needs them."""
    keywords: dict[str, Any] = {
        name: node.own[name] for name in ("minimum", "maximum", "multipleOf") if name in node.own
    }
    if "number" not in node.kinds or "anyOf" not in (numbers := within(keywords)):
        return
    for name in keywords:
        del node.own[name]
    node.others.append(either([numbers, *node.of_other_types("number", "integer")]))


# Strings


def _lengths(node: Node) -> None:
    for name in ("minLength", "maxLength"):
        if (value := node.count(name)) is not None:
            node.own[name] = value


def _pattern(node: Node) -> None:
    pattern = node.get("pattern", lambda value: isinstance(value, str), "a string")
    if pattern is not None and (patterns := node.translated("pattern", pattern, conjuncts)) is not None:
        node.own["pattern"], *further = patterns
        node.others += [{"pattern": other} for other in further]


def _format(node: Node) -> None:
    """Express the format of strings by other keywords."""
    name = node.get("format", lambda value: isinstance(value, str), "a string")
    if name is None:
        return
    if name not in FORMATS:
        node.note("format", f"{shown(name)} is not known")
    elif "pattern" in node.own:
        node.others.append({**FORMATS[name]})
    else:
        merged = {**FORMATS[name]}
        if "maxLength" in merged:
            merged["maxLength"] = min(merged["maxLength"], node.own.get("maxLength", merged["maxLength"]))
        node.own.update(merged)
