"""Keywords about arrays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from .complement import EXPRESSIBLE, either
from .json_values import Schema, equal, why_inexact
from .keywords import admits_everything
from .walk import Node

_MAX_LENGTH, _MAX_CHOICES = 20, 50
"""Maximum number of first items from which some are chosen, and of choices."""
_MAX_ARRAYS, _MAX_DIFFERENT = 500, 100
"""Maximum number of arrays of distinct items, and of items in one of them."""


def express(node: Node) -> None:
    """Express the keywords about arrays."""
    if "array" in node.kinds:
        _items(node)
        _lengths(node)
        _contains(node)
        _unique_items(node)


def _items(node: Node) -> None:
    """Express the items: the first ones, each with its schema, and the rest."""
    schema = node.schema
    items, first = schema.get("items"), node.get("prefixItems", lambda value: isinstance(value, list), "a list")
    rest: tuple[Any, str] | None = None
    if isinstance(items, list):
        if first is None:
            node.own["prefixItems"] = [node.child(item, "items", number) for number, item in enumerate(items)]
        else:
            node.note("items", "must be a schema next to prefixItems, got a list")
        if "additionalItems" in schema:
            rest = schema["additionalItems"], "additionalItems"
    elif "items" in schema:
        rest = items, "items"
    if first is not None:
        node.own["prefixItems"] = [node.child(item, "prefixItems", number) for number, item in enumerate(first)]
    if not admits_everything(schema.get("unevaluatedItems", True)):
        if node.in_place or "contains" in schema:
            node.note("unevaluatedItems", "is not supported with $ref, contains or compositions of schemas")
        elif rest is None:
            rest = schema["unevaluatedItems"], "unevaluatedItems"
    if rest is not None:
        node.own["items"] = node.child(*rest)


def _lengths(node: Node) -> None:
    own = node.own
    for name in ("minItems", "maxItems"):
        if (value := node.count(name)) is not None:
            own[name] = value
    if own.get("minItems", 0) > 0 and own.get("items") is False:
        own["maxItems"] = min(own.get("maxItems", 2**32), len(own.get("prefixItems", ())))


def _unique_items(node: Node) -> None:
    """Express `uniqueItems`: by nothing if items always differ, else by a list of all such arrays."""
    own, schema = node.own, node.schema
    if not node.get("uniqueItems", lambda value: isinstance(value, bool), "a boolean"):
        return
    items, most = schema.get("items"), own.get("maxItems", math.inf)
    first = schema.get("prefixItems", items if isinstance(items, list) else ())
    if own.get("items") is False:
        most = min(most, len(first))
    if most <= 1 or (own.get("items") is False and node.exclusive(first)):
        return
    listed = [node.walk.comparison.listed(item, node.resource) for item in first]
    rest = node.walk.comparison.listed(items, node.resource) if most > len(first) else []
    alone = node.kinds == {"array"} and own.keys() <= {"type", "prefixItems", "items", "minItems", "maxItems"}
    if rest is None or None in listed or not alone or why_inexact([rest, listed]) is not None:
        node.note("uniqueItems", "is supported only for arrays whose items are listed or have few values")
        return
    longest = int(min(most, len(first) + len(rest), _MAX_DIFFERENT))
    places = [*(values or [] for values in listed), *[rest] * longest][:longest]
    arrays = _different(places, own.get("minItems", 0))
    if len(arrays) > _MAX_ARRAYS:
        node.note("uniqueItems", f"is supported only if at most {_MAX_ARRAYS} arrays have distinct items")
        return
    own.clear()
    own["enum"] = arrays


def _different(places: Sequence[Sequence[Any]], shortest: int) -> list[list[Any]]:
    """Return the arrays of distinct items, shortest first; `places`: the possible values at each index. If there are
    too many arrays, return more than `_MAX_ARRAYS` of them.
    """
    longer = [list[Any]()]
    arrays = [] if shortest else [*longer]
    for size, values in enumerate(places, 1):
        longer = [
            [*array, value] for array in longer for value in values if not any(equal(value, item) for item in array)
        ]
        arrays += longer if size >= shortest else []
        if len(longer) > _MAX_ARRAYS:
            return longer
    return arrays


def _contains(node: Node) -> None:
    """Express `contains`, `minContains` and `maxContains` by choices of indices. Items that must be valid are chosen
    from the first items, as many as give few choices. Items that must be invalid need a maximum length, unless all must
    be.
    """
    if "contains" not in node.schema:
        return
    stated_least, stated_most = node.count("minContains"), node.count("maxContains")
    least, most = 1 if stated_least is None else stated_least, math.inf if stated_most is None else stated_most
    length = node.own.get("maxItems", math.inf)
    if node.own.get("items") is False:
        length = min(length, len(node.own.get("prefixItems", ())))
    choices = _choices(length, least) * _choices(length, length - most) if 0 < most < length else 1
    if least > _MAX_LENGTH or choices > _MAX_CHOICES:
        of = f"maxItems is at most {_MAX_LENGTH}, and at most {_MAX_CHOICES} choices of items"
        node.note("contains", f"is supported only if {of} satisfy it")
        return
    if least > 0:
        valid, reach = node.definition("contains"), int(min(length, _MAX_LENGTH))
        while math.comb(reach, least) > _MAX_CHOICES:
            reach -= 1
        _choice_of_items(node, reach, least, lambda places: _items_at(places, valid, required=True))
    if most < length:
        beside = True if "prefixItems" in node.own else node.schema.get("items", True)
        other = node.walk.complements.of(node.schema["contains"], beside, node.resource)
        if other is None:
            node.note("contains", f"is supported with maxContains only for {EXPRESSIBLE}")
        elif most == 0:
            node.others.append({"items": other})
        else:
            number = int(length - most)
            _choice_of_items(node, int(length), number, lambda places: _items_at(places, other, required=False))


def _choices(length: float, number: float) -> float:
    """Return the number of choices of `number` indices."""
    return 1 if number <= 0 else math.inf if length > _MAX_LENGTH else math.comb(int(length), int(number))


def _choice_of_items(node: Node, length: int, number: int, holds: Callable[[Sequence[int]], Schema]) -> None:
    """Express a schema that holds for at least one choice of `number` indices."""
    choices = itertools.combinations(range(length), number)
    node.others.append(either([*node.of_other_types("array"), *map(holds, choices)]))


def _items_at(places: Sequence[int], schema: Schema, required: bool) -> Schema:
    """Return the schema of arrays whose items at `places` have the given schema."""
    first = [schema if place in places else True for place in range(places[-1] + 1)]
    return {"type": "array", "prefixItems": first, **({"minItems": len(first)} if required else {})}
