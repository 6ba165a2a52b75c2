"""What a JSON schema does not admit, as a schema: for `not`, for `if`, and for `oneOf` whose branches share values.

llguidance has no complement. But a schema is a conjunction of keywords, so that its complement is what any of them
excludes: other types, other constants, numbers beyond a limit, a property that is missing or has another value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Set
from functools import partial
from typing import Any

from .disjoint import Comparison
from .json_values import TYPES, Schema, at_pointer, is_number, kind_of, strings, type_of, types_named, unwritable
from .numbers import inclusive
from .parts import about, is_count, keywords
from .patterns import excluding
from .references import References

MAX_PARTS = 1_000
"""Most schemas of a document whose complements are looked for."""
_MAX_DEPTH = 8
"""Levels of schemas within a schema whose complement is looked for."""
_MAX_NAMES = 50
"""Most names of which an object has one: they are as many alternatives."""
_MAX_NUMBERS = 50
"""Most numbers whose others are told: they are as many ranges."""


class Complements:
    """Complements of the schemas of a document, up to a number of parts."""

    def __init__(self, document: Schema, references: References, comparison: Comparison) -> None:
        self._document, self._references, self._comparison = document, references, comparison
        self._parts = MAX_PARTS

    def of(self, schema: Any, beside: Schema, resource: str, depth: int = 0) -> Schema | None:
        """Return the schema of the values that are not valid under another, in keywords that are enforced; None where
        it cannot be expressed. `beside`: a schema that the values have too, whatever else.
        """
        self._parts -= 1
        among = self._comparison.types(beside, resource)
        if isinstance(schema, bool):
            return False if schema else _of_types(among, among)
        if not isinstance(schema, dict) or self._parts < 0 or depth > _MAX_DEPTH:
            return None
        names = keywords(schema)
        if "$ref" in names and self._references.hide_siblings:
            names = {"$ref"}
        excluded = (self._excluded(name, schema, among, beside, resource, depth + 1) for name in names)
        return _all_known(either, excluded)

    def _excluded(
        self, keyword: str, schema: dict[str, Any], among: Set[str], beside: Schema, resource: str, depth: int
    ) -> Schema | None:
        """Return the schema of the values that a keyword excludes, which are of the types `among`."""
        value, draft = schema[keyword], self._references.draft
        if (kinds := about(keyword)) and not among & {*kinds}:
            return False
        match keyword, value:
            case "$ref", str():
                target = self._references.resolved(value, resource)
                return target and self.of(at_pointer(self._document, target[0]), beside, target[1], depth)
            case "type", str() | list():
                named = [value] if isinstance(value, str) else strings(value)
                return _of_types(among - types_named(named), among) if {*named} <= {*TYPES} else None
            case "enum", list():
                return _other_values(value, among)
            case "const", _ if draft >= "06":
                return _other_values([value], among)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", _:
                return _beyond(keyword, schema, among, draft)
            case "minLength" | "minItems", _ if is_count(value):
                return {"type": kinds[0], f"max{keyword[3:]}": int(value) - 1} if value else False
            case "maxLength" | "maxItems", _ if is_count(value):
                return {"type": kinds[0], f"min{keyword[3:]}": int(value) + 1}
            case "required", list() if strings(value) == value and unwritable(value) is None:
                return either(_lacking(name) for name in value)
            case "properties", dict():
                at = partial(self._comparison.at, beside)
                others = {name: self.of(part, at(name), resource, depth) for name, part in value.items()}
                return _all_known(either, (_with_property(name, other) for name, other in others.items()))
            case "additionalProperties" | "items", True:
                return False
            case "additionalProperties", False:
                names = self._comparison.names(beside, resource)
                return None if names is None else _with_others(names, schema.get("properties"))
            case "anyOf" | "oneOf", list() if keyword == "anyOf" or self._comparison.exclusive(value, resource):
                return _all_known(both, (self.of(part, beside, resource, depth) for part in value))
            case "allOf", list():
                return _all_known(either, (self.of(part, beside, resource, depth) for part in value))
            case _:
                return None


def _all_known(combine: Any, schemas: Iterable[Schema | None]) -> Schema | None:
    known = list(schemas)
    return None if None in known else combine(known)


def _of_types(kinds: Set[str], among: Set[str]) -> Schema | None:
    """Return the schema of the values of some types, where there are no others than `among`."""
    if "number" in kinds and "integer" in among - kinds:
        return None  # numbers that are no integers
    left = [kind for kind in TYPES if kind in kinds and not (kind == "integer" and "number" in kinds)]
    return {"type": left} if left else False


def _other_values(values: list[Any], among: Set[str]) -> Schema | None:
    values = [value for value in values if type_of(value) in among]
    kinds = {kind_of(value) for value in values}
    if kinds & {"array", "object"} or unwritable(values) is not None:
        return None
    left: list[Schema | None] = [_of_types(among - types_named(kinds), among)]
    if "boolean" in kinds:
        left += [{"const": value} for value in (False, True) if value not in values]
    if "string" in kinds:
        pattern = excluding(strings(values))
        left.append(None if pattern is None else {"type": "string", "pattern": pattern})
    if "number" in kinds:
        left += _between(sorted({value for value in values if kind_of(value) == "number"}), among)
    return _all_known(either, left)


def _between(numbers: list[float], among: Set[str]) -> list[Schema | None]:
    """Return the schemas of the numbers below, between and above some."""
    if len(numbers) > _MAX_NUMBERS:
        return [None]
    limits = [None, *((number, True) for number in numbers), None]
    return [_range(least, most, among) for least, most in itertools.pairwise(limits)]


def _beyond(keyword: str, schema: dict[str, Any], among: Set[str], draft: str) -> Schema | None:
    """Return the schema of the numbers that are beyond a limit."""
    value, side = schema[keyword], keyword[-7:].lower()
    exclusive = f"exclusive{side.title()}"
    if keyword == exclusive and draft < "06":
        return False if isinstance(value, bool) else None  # it says how the other keyword is meant
    if not is_number(value):
        return None
    limit = value, keyword != exclusive and not (draft < "06" and schema.get(exclusive) is True)
    return _range(None, limit, among) if side == "minimum" else _range(limit, None, among)


def _range(least: tuple[float, bool] | None, most: tuple[float, bool] | None, among: Set[str]) -> Schema | None:
    """Return the schema of the numbers between two limits, each with whether it is exclusive."""
    whole = "number" not in among
    limits = {
        name: inclusive(*limit, upward=name == "minimum", whole=whole)
        for name, limit in (("minimum", least), ("maximum", most))
        if limit is not None
    }
    if any(abs(limit) >= 2**63 for limit in limits.values()):
        return None
    if limits.get("minimum", -math.inf) > limits.get("maximum", math.inf):
        return False
    return {"type": "integer" if whole else "number", **limits}


def _with_others(names: Set[str], listed: Any) -> Schema | None:
    """Return the schema of objects with one of some names at least that is not listed."""
    others = sorted(names - {*listed} if isinstance(listed, dict) else names)
    if len(others) > _MAX_NAMES or unwritable(others) is not None:
        return None
    return either({"type": "object", "required": [name]} for name in others)


def _lacking(name: str) -> Schema:
    """Return the schema of objects without a property."""
    return {"type": "object", "properties": {name: False}}


def _with_property(name: str, schema: Schema | None) -> Schema | None:
    """Return the schema of objects with a property that has a schema."""
    if isinstance(schema, dict) and unwritable(name) is None:
        return {"type": "object", "required": [name], "properties": {name: schema}}
    return False if schema is False else None


def either(schemas: Iterable[Schema]) -> Schema:
    """Return the schema of the values that are valid under any of some."""
    options = [schema for schema in schemas if schema is not False]
    if True in options or len(options) < 2:
        return True in options or (options[0] if options else False)
    return {"anyOf": options}


def both(schemas: Iterable[Schema]) -> Schema:
    """Return the schema of the values that are valid under all of some."""
    parts = [schema for schema in schemas if schema is not True]
    if False in parts or len(parts) < 2:
        return False not in parts and (parts[0] if parts else True)
    return {"allOf": parts}
