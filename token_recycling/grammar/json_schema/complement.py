"""Complements of JSON schemas: for `not`, for `if`, and for `oneOf` whose branches share values.

llguidance has no complement. But a schema is a conjunction of keywords, so its complement is the union of the values
that each keyword excludes: other types, other constants, numbers beyond a limit, a missing property or one with another
value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Set
from functools import partial
from typing import Any

from .disjoint import Comparison
from .formats import NO_VALID_STRINGS
from .json_values import TYPES, Schema, at_pointer, is_count, kind_of, strings, type_of, types_named, why_inexact
from .keywords import about, keywords
from .lookahead import nowhere
from .numbers import EXCLUSIVE, LOWER, TOO_LARGE, Limit, inclusive, is_exclusive_flag, limit_of, within
from .patterns import excluding
from .references import References

EXPRESSIBLE = (
    "types, ranges, lengths, constants except arrays and objects, simple patterns, some formats, required properties, "
    "and properties with schemas of these"
)
"""The schemas whose complements can be expressed, for error messages."""
MAX_PARTS = 1_000
"""Maximum number of schemas of a document whose complements are computed."""
_MAX_DEPTH = 8
"""Maximum nesting depth of a schema whose complement is computed."""
_MAX_NAMES = 50
"""Maximum names of which an object must have one: each is an alternative."""
_MAX_NUMBERS = 50
"""Maximum excluded numbers: the complement has one range more."""


class Complements:
    """Complements of the schemas of a document, up to a number of parts."""

    def __init__(self, document: Schema, references: References, comparison: Comparison) -> None:
        self._document, self._references, self._comparison = document, references, comparison
        self._parts = MAX_PARTS

    def of(self, schema: Any, beside: Schema, resource: str, depth: int = 0) -> Schema | None:
        """Return the schema of the values that are invalid under `schema`, in enforceable keywords; None if it cannot
        be expressed. `beside`: a schema under which all these values are valid.
        """
        self._parts -= 1
        among = self._comparison.types(beside, resource)
        if isinstance(schema, bool):
            return False if schema else _of_types(among, among)
        if not isinstance(schema, dict) or self._parts < 0 or depth > _MAX_DEPTH:
            return None
        schema = self._references.effective(schema)
        excluded = (self._excluded(name, schema, among, beside, resource, depth + 1) for name in keywords(schema))
        return _if_known(either, excluded)

    def lacking(self, schema: Any, other: Any, resource: str) -> Schema | None:
        """Return the schema of objects that lack a property required by `schema` but not by `other`, and of non-objects
        if `schema` admits only objects. Return None if `schema` requires no further property.
        """
        names = self._comparison.required(schema, resource) - self._comparison.required(other, resource)
        others = {*TYPES} - {"object"} if self._comparison.types(schema, resource) == {"object"} else set()
        return either([_of_types(others, others) or False, *map(_lacking, sorted(names))]) if names else None

    def _excluded(
        self, keyword: str, schema: dict[str, Any], among: Set[str], beside: Schema, resource: str, depth: int
    ) -> Schema | None:
        """Return the schema of the values of the types `among` that a keyword excludes."""
        value = schema[keyword]
        if (kinds := about(keyword)) and not among & {*kinds}:
            return False
        if not self._references.knows(keyword):
            return None
        match keyword, value:
            case "$ref", str():
                target = self._references.resolved(value, resource)
                return target and self.of(at_pointer(self._document, target[0]), beside, target[1], depth)
            case "type", str() | list():
                named = [value] if isinstance(value, str) else strings(value)
                return _of_types(among - types_named(named), among) if {*named} <= {*TYPES} else None
            case "enum", list():
                return _other_values(value, among)
            case "const", _:
                return _other_values([value], among)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum", _:
                return _beyond(keyword, schema, among, self._references.draft)
            case "minLength" | "minItems", _ if is_count(value):
                return {"type": kinds[0], f"max{keyword[3:]}": int(value) - 1} if value else False
            case "maxLength" | "maxItems", _ if is_count(value):
                return {"type": kinds[0], f"min{keyword[3:]}": int(value) + 1}
            case "format", str() if value in NO_VALID_STRINGS:
                return {"type": "string", "pattern": NO_VALID_STRINGS[value]} if "string" in among else False
            case "pattern", str():
                return _unmatched(value)
            case "required", list() if strings(value) == value and why_inexact(value) is None:
                return either(_lacking(name) for name in value)
            case "properties", dict():
                at = partial(self._comparison.at, beside)
                others = {name: self.of(part, at(name), resource, depth) for name, part in value.items()}
                return _if_known(either, (_with_property(name, other) for name, other in others.items()))
            case "additionalProperties" | "items", True:
                return False
            case "additionalProperties", False:
                names = self._comparison.names(beside, resource)
                return None if names is None else _with_others(names, schema.get("properties"))
            case "anyOf" | "oneOf", list() if keyword == "anyOf" or self._comparison.exclusive(value, resource):
                return _if_known(both, (self.of(part, beside, resource, depth) for part in value))
            case "allOf", list():
                return _if_known(either, (self.of(part, beside, resource, depth) for part in value))
            case _:
                return None


def known(schemas: Iterable[Schema | None]) -> list[Schema] | None:
    """Return the schemas as a list, or None if one of them is unknown."""
    schemas = list(schemas)
    known_ones = [schema for schema in schemas if schema is not None]
    return known_ones if len(known_ones) == len(schemas) else None


def _if_known(combine: Callable[[Iterable[Schema]], Schema], schemas: Iterable[Schema | None]) -> Schema | None:
    known_ones = known(schemas)
    return None if known_ones is None else combine(known_ones)


def _of_types(kinds: Set[str], among: Set[str]) -> Schema | None:
    """Return the schema of the values of types `kinds`, given that all values have types `among`."""
    if "number" in kinds and "integer" in among - kinds:
        return None  # numbers except integers
    left = [kind for kind in TYPES if kind in kinds and not (kind == "integer" and "number" in kinds)]
    return {"type": left} if left else False


def _other_values(values: list[Any], among: Set[str]) -> Schema | None:
    values = [value for value in values if type_of(value) in among]
    kinds = {kind_of(value) for value in values}
    if kinds & {"array", "object"} or why_inexact(values) is not None:
        return None
    left: list[Schema | None] = [_of_types(among - types_named(kinds), among)]
    if "boolean" in kinds:
        left += [{"const": value} for value in (False, True) if all(value is not one for one in values)]
    if "string" in kinds:
        pattern = excluding(strings(values))
        left.append(None if pattern is None else {"type": "string", "pattern": pattern})
    if "number" in kinds:
        left += _between(sorted({value for value in values if kind_of(value) == "number"}), among)
    return _if_known(either, left)


def _unmatched(pattern: str) -> Schema | None:
    """Return the schema of strings that do not match a pattern."""
    try:
        return both({"type": "string", "pattern": other} for other in nowhere(pattern))
    except ValueError:
        return None


def _between(numbers: list[float], among: Set[str]) -> list[Schema | None]:
    """Return the schemas of the numbers below, between and above `numbers`."""
    if len(numbers) > _MAX_NUMBERS:
        return [None]
    borders = [None, *(Limit(number, exclusive=True) for number in numbers), None]
    return [_range(least, most, among) for least, most in itertools.pairwise(borders)]


def _beyond(keyword: str, schema: dict[str, Any], among: Set[str], draft: str) -> Schema | None:
    """Return the schema of the numbers beyond the limit that a keyword sets."""
    if is_exclusive_flag(keyword, schema):
        return False if draft < "06" else None
    limit = limit_of(keyword, schema)
    if limit is None or (keyword in EXCLUSIVE.values() and draft < "06"):
        return None
    beyond = Limit(limit.value, not limit.exclusive)
    return _range(None, beyond, among) if keyword in LOWER else _range(beyond, None, among)


def _range(least: Limit | None, most: Limit | None, among: Set[str]) -> Schema | None:
    """Return the schema of the numbers between two limits."""
    whole = "number" not in among
    limits = {
        name: inclusive(limit, upward=name == "minimum", whole=whole)
        for name, limit in (("minimum", least), ("maximum", most))
        if limit is not None
    }
    if any(abs(limit) >= TOO_LARGE for limit in limits.values()):
        return None
    if limits.get("minimum", -math.inf) > limits.get("maximum", math.inf):
        return False
    return {"type": "integer", **limits} if whole else within(limits)


def _with_others(names: Set[str], listed: Any) -> Schema | None:
    """Return the schema of objects with at least one of `names` that is not in `listed`."""
    others = sorted(names - {*listed} if isinstance(listed, dict) else names)
    if len(others) > _MAX_NAMES or why_inexact(others) is not None:
        return None
    return either({"type": "object", "required": [name]} for name in others)


def _lacking(name: str) -> Schema:
    """Return the schema of objects without the property `name`."""
    return {"type": "object", "properties": {name: False}}


def _with_property(name: str, schema: Schema | None) -> Schema | None:
    """Return the schema of objects whose property `name` has this schema."""
    if isinstance(schema, dict) and why_inexact(name) is None:
        return {"type": "object", "required": [name], "properties": {name: schema}}
    return False if schema is False else None


def either(schemas: Iterable[Schema]) -> Schema:
    """Return the schema of the values that are valid under any of the schemas."""
    options = [schema for schema in schemas if schema is not False]
    if True in options or len(options) < 2:
        return True in options or (options[0] if options else False)
    return {"anyOf": options}


def both(schemas: Iterable[Schema]) -> Schema:
    """Return the schema of the values that are valid under all of the schemas."""
    parts = [schema for schema in schemas if schema is not True]
    if False in parts or len(parts) < 2:
        return False not in parts and (parts[0] if parts else True)
    return {"allOf": parts}
