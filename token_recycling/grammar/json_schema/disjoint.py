"""Tests whether two JSON schemas are disjoint. `oneOf` with disjoint branches equals `anyOf`, which is enforceable."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .json_values import TYPES, Schema, at_pointer, equal, is_count, kind_of, strings, type_of, types_named
from .keywords import IN_PLACE, about, admits_everything, keywords
from .numbers import EXCLUSIVE, LOWER, inclusive, limit_of
from .patterns import apart
from .references import References

MAX_COMPARISONS = 5_000
"""Maximum number of comparisons per document: pairs of schemas, and schemas whose types are computed."""
_OF_PATTERNS = 20
"""The cost of comparing two patterns, about half a millisecond, as a number of comparisons."""
_MAX_CONJUNCTS = 20
"""Maximum number of schemas in the conjunction of one schema."""
_OF_OTHER_PROPERTIES = {
    "anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies", "patternProperties",
    "additionalProperties", "unevaluatedProperties", "$dynamicRef", "$recursiveRef",
}  # fmt: skip
"""Keywords that may evaluate properties that a schema does not list."""


class Comparison:
    """Compares schemas of a document, with a limited number of comparisons."""

    def __init__(self, document: Schema, references: References) -> None:
        self._document, self._references = document, references
        self._comparisons = MAX_COMPARISONS

    def _exceeds_limit(self, depth: int) -> bool:
        """Count a comparison; return whether the limit is exceeded, the schema is nested too deeply, or the document
        has several resources.
        """
        self._comparisons -= 1
        return self._comparisons < 0 or depth > 4 or self._references.has_resources

    def disjoint(self, one: Any, other: Any, resource: str, depth: int = 0) -> bool:
        """Return whether it is certain that no value is valid under both schemas."""
        if self._exceeds_limit(depth):
            return False
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict):
            return False
        ours, theirs = self._conjuncts(one, resource), self._conjuncts(other, resource)
        kinds = _kinds(ours) & _kinds(theirs)
        if not kinds:
            return True
        some, others = _values(ours), _values(theirs)
        if some is not None and others is not None and not any(equal(a, b) for a in some for b in others):
            return True
        for branches, opposite in ((ours, other), (theirs, one)):
            for options in _choices(branches):
                if all(self.disjoint(option, opposite, resource, depth + 1) for option in options):
                    return True
        if kinds == {"string"}:
            return any(self._apart(mine, yours) for mine in _patterns(ours) for yours in _patterns(theirs))
        if kinds == {"array"}:
            return any(_is_never_empty(part) for part in (*ours, *theirs)) and any(
                self.disjoint(mine, yours, resource, depth + 1)
                for mine in _first_items(ours)
                for yours in _first_items(theirs)
            )
        if kinds != {"object"}:
            return False
        required = _required([*ours, *theirs])
        return any(_forbids(part, name) for part in (*ours, *theirs) for name in required) or any(
            self.disjoint(mine, yours, resource, depth + 1)
            for name in required
            for mine in _properties(ours, name)
            for yours in _properties(theirs, name)
        )

    def _apart(self, one: str, other: str) -> bool:
        """Return whether it is certain that no string matches both patterns, at the cost of several comparisons."""
        self._comparisons -= _OF_PATTERNS
        return self._comparisons >= 0 and apart(one, other)

    def exclusive(self, options: Sequence[Any], resource: str, written: Sequence[Any] = ()) -> bool:
        """Return whether it is certain that no value is valid under two of the schemas; `written`: for each, a schema
        of the values that outputs may have, if narrower.
        """
        if self._are_tagged(options, resource):
            return True
        pairs = itertools.permutations if written else itertools.combinations
        return len(options) ** 2 < 2 * MAX_COMPARISONS and all(
            self.disjoint((written or options)[one], options[other], resource)
            for one, other in pairs(range(len(options)), 2)
        )

    def _are_tagged(self, options: Sequence[Any], resource: str) -> bool:
        """Return whether the schemas have different constants, or have them in a property that all of them require."""
        if self._references.has_resources:
            return False
        schemas = [self._conjuncts(option, resource) for option in options]
        if _have_own_values(schemas):
            return True
        tags = [self.required(option, resource) for option in options]
        return all(_kinds(parts) == {"object"} for parts in schemas) and any(
            _have_own_values(self._conjuncts({"allOf": [*_properties(parts, name)]}, resource) for parts in schemas)
            for name in sorted(set.intersection(*tags))
        )

    def constrains_only_objects(self, schema: Any, resource: str) -> bool:
        """Return whether a schema constrains objects and nothing else: every other value is valid."""
        parts = self._conjuncts(schema, resource)
        return len(parts) < _MAX_CONJUNCTS and {*map(about, _said(parts))} == {("object",)}

    def required(self, schema: Any, resource: str) -> set[str]:
        """Return the names of the properties that all objects of a schema have."""
        return _required(self._conjuncts(schema, resource))

    def closed(self, schema: Any, resource: str) -> Schema:
        """Return a schema with its objects closed, if possible, even if it only refers to another schema."""
        last, visited = schema, set[str]()
        while keywords(last) == {"$ref"} and (target := self._references.resolved(last["$ref"], resource)) is not None:
            if target[0] in visited:
                break
            visited.add(target[0])
            last, resource = at_pointer(self._document, target[0]), target[1]
        if not (isinstance(last, dict) and may_be_closed(last)):
            return schema
        names = dict.fromkeys(names_if_closed(last), True)
        return {"allOf": [schema, {"properties": names, "additionalProperties": False}]}

    def types(self, schema: Any, resource: str = "#", depth: int = 0) -> set[str]:
        """Return the possible types of the values of a schema."""
        self._comparisons -= 1
        if self._comparisons < 0 or isinstance(schema, bool):
            return set() if schema is False else {*TYPES}
        parts = self._conjuncts(schema, resource)
        kinds = _kinds(parts)
        for options in _choices(parts) if depth < 4 else ():
            kinds &= {kind for option in options for kind in self.types(option, resource, depth + 1)}
        return kinds

    def at(self, schema: Any, name: str, resource: str = "#", depth: int = 0) -> Schema:
        """Return a schema that holds for a property in all objects of `schema`; False if no object has the property."""
        if self._exceeds_limit(depth):
            return True
        parts = self._conjuncts(schema, resource)
        if any(_forbids(part, name) for part in parts):
            return False
        held = [*_properties(parts, name)]
        for options in _choices(parts):
            held.append({"anyOf": [self.at(option, name, resource, depth + 1) for option in options]})
        return {"allOf": held}

    def names(self, schema: Any, resource: str = "#", depth: int = 0) -> set[str] | None:
        """Return the names of all possible properties of objects of a schema; None if the names are unlimited."""
        if self._exceeds_limit(depth):
            return None
        parts, found = self._conjuncts(schema, resource), list[set[str]]()
        for part in parts:
            properties = part.get("properties", {})
            if _is_closed(part) and isinstance(properties, dict):
                found.append({*properties})
        for options in _choices(parts):
            names = [self.names(option, resource, depth + 1) for option in options]
            found += [] if None in names else [set().union(*filter(None, names))]
        return set.intersection(*found) if found else None

    def evaluated(self, schema: Any, resource: str) -> set[str] | None:
        """Return the names of the properties that a schema, or another in its conjunction, evaluates; None if further
        properties may be evaluated, depending on the value.
        """
        parts = self._conjuncts(schema, resource)
        others = [keywords(schema) - {"unevaluatedProperties"}, *map(keywords, parts[1:])]
        if len(parts) == _MAX_CONJUNCTS or any(names & _OF_OTHER_PROPERTIES for names in others):
            return None
        properties = [part.get("properties", {}) for part in parts]
        return set().union(*properties) if all(isinstance(listed, dict) for listed in properties) else None

    def listed(self, schema: Any, resource: str) -> list[Any] | None:
        """Return the distinct values of a schema that lists them, or whose types and limits admit few; None for other
        schemas.
        """
        parts = self._conjuncts(schema, resource)
        kinds, different = _kinds(parts), list[Any]()
        said = _said(parts) - {"type"}
        if said == {"anyOf"} and len(choices := [*_choices(parts)]) == 1:
            listed = [self.listed(option, resource) for option in choices[0]]
            values = None if None in listed else list(itertools.chain(*filter(None, listed)))
        elif said <= {"enum", "const"} and (values := _values(parts)) is not None:
            pass
        else:
            values = _few(kinds, parts, said)
        if values is None:
            return None
        for value in values:
            if type_of(value) in kinds and not any(equal(value, other) for other in different):
                different.append(value)
        return different

    def _conjuncts(self, schema: Schema, resource: str) -> list[dict[str, Any]]:
        """Return the conjunction that a schema stands for: the schema itself, those of its `allOf`, and the referenced
        ones.
        """
        parts, left, visited = list[dict[str, Any]](), [(schema, resource)], set[str]()
        while left and len(parts) < _MAX_CONJUNCTS:
            part, resource = left.pop()
            if not isinstance(part, dict):
                continue
            part = self._references.effective(part)
            parts.append(part)
            if isinstance(part.get("allOf"), list):
                left.extend((conjunct, resource) for conjunct in part["allOf"])
            target = self._references.resolved(part.get("$ref"), resource)
            if target is not None and target[0] not in visited:
                visited.add(target[0])
                left.append((at_pointer(self._document, target[0]), target[1]))
        return parts


def _said(parts: Iterable[dict[str, Any]]) -> set[str]:
    """Return the keywords of a conjunction, except `$ref` and `allOf`."""
    return set[str]().union(*map(keywords, parts)) - {"$ref", "allOf"}


def _required(parts: Iterable[dict[str, Any]]) -> set[str]:
    """Return the names of the properties that a conjunction requires."""
    return {name for part in parts for name in strings(part.get("required"))}


def _choices(parts: Iterable[dict[str, Any]]) -> Iterator[list[Any]]:
    """Yield lists of schemas, each with at least one that holds."""
    for part in parts:
        options = part.get("anyOf", part.get("oneOf"))
        if isinstance(options, list):
            yield options


def _forbids(part: dict[str, Any], name: str) -> bool:
    """Return whether it is certain that no object with a property of this name is valid under a schema."""
    properties, excluded = part.get("properties", {}), part.get("not", {})
    options: list[Any] = next(_choices([excluded]), []) if keywords(excluded) == {"anyOf"} else [excluded]
    if any(keywords(option) == {"required"} and option["required"] == [name] for option in options):
        return True
    if not isinstance(properties, dict):
        return False
    if name in properties:
        return properties[name] is False
    return _is_closed(part)


def may_be_closed(schema: dict[str, Any]) -> bool:
    """Return whether a schema allows additional properties only implicitly and never needs them, so that its objects
    can be closed.
    """
    least = schema.get("minProperties", 0)
    return (
        isinstance(schema.get("properties"), dict)
        and (not is_count(least) or least <= len(names_if_closed(schema)))
        and admits_everything(schema.get("unevaluatedProperties", True))
        and not schema.keys() & {"patternProperties", "propertyNames", "additionalProperties", "enum", "const"}
        and all(_only_requires(schema, name) for name in (*IN_PLACE, "then", "else") if name in schema)
    )


def names_if_closed(schema: dict[str, Any]) -> dict[str, None]:
    """Return the names of the properties of a schema whose objects are closed: listed, required and dependent ones."""
    dependent = [schema[name] for name in _DEPENDENT if isinstance(schema.get(name), dict)]
    stated = [[name, *strings(needed)] for names in dependent for name, needed in names.items()]
    return dict.fromkeys([*schema["properties"], *strings(schema.get("required")), *itertools.chain(*stated)])


_DEPENDENT = [name for name in IN_PLACE if about(name)]


def _only_requires(schema: dict[str, Any], keyword: str) -> bool:
    """Return whether the schemas of a composition have only `required`, with names of the closed object."""
    composition = schema[keyword]
    if keyword in _DEPENDENT and isinstance(composition, dict):
        composition = [one for one in composition.values() if not isinstance(one, list)]
    branches = composition if isinstance(composition, list) else [composition]
    return all(
        isinstance(branch, dict)
        and keywords(branch) <= {"required"}
        and {*strings(branch.get("required"))} <= names_if_closed(schema).keys()
        for branch in branches
    )


def _is_closed(part: dict[str, Any]) -> bool:
    """Return whether objects have only the properties that a schema lists."""
    return part.get("additionalProperties") is False and not part.get("patternProperties")


def _patterns(parts: Iterable[dict[str, Any]]) -> list[str]:
    return strings([part.get("pattern") for part in parts])


def _is_never_empty(part: dict[str, Any]) -> bool:
    """Return whether arrays of a schema have at least one item."""
    return is_count(part.get("minItems")) and part["minItems"] > 0


def _first_items(parts: Iterable[dict[str, Any]]) -> Iterator[Any]:
    """Yield the schemas of the first item of an array."""
    for part in parts:
        items = part.get("items")
        first = part.get("prefixItems", items if isinstance(items, list) else [])
        if isinstance(first, list) and first:
            yield first[0]
        elif isinstance(items, dict | bool):
            yield items


def _properties(parts: Iterable[dict[str, Any]], name: str) -> Iterator[Any]:
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            yield properties[name]


def _values(parts: Iterable[dict[str, Any]]) -> list[Any] | None:
    """Return a list that contains all values of a conjunction; None if it lists no values."""
    for part in parts:
        if "const" in part:
            return [part["const"]]
        if isinstance(part.get("enum"), list) and len(part["enum"]) < 100:
            return part["enum"]
    return None


def _have_own_values(schemas: Iterable[list[dict[str, Any]]]) -> bool:
    """Return whether each of the conjunctions lists scalars, and no scalar is listed twice."""
    listed = [_values(parts) for parts in schemas]
    values = [{(kind_of(value), value) for value in values} for values in listed if values and _are_scalars(values)]
    return len(values) == len(listed) and len(set().union(*values)) == sum(map(len, values))


def _are_scalars(values: list[Any]) -> bool:
    return not any(isinstance(value, dict | list) for value in values)


def _few(kinds: set[str], parts: Iterable[dict[str, Any]], said: set[str]) -> list[Any] | None:
    """Return the values of a conjunction of only types and limits; None if there are many, or other keywords."""
    if not said and kinds <= {"boolean", "null"}:
        return [False, True, None]
    limits: dict[bool, list[float]] = {True: [], False: []}
    if kinds != {"integer"} or not said <= {*EXCLUSIVE, *EXCLUSIVE.values()}:
        return None
    for part in parts:
        for keyword in part.keys() & said:
            limit = limit_of(keyword, part)
            if limit is None:
                return None
            limits[keyword in LOWER].append(inclusive(limit, upward=keyword in LOWER, whole=True))
    least, most = max(limits[True], default=-math.inf), min(limits[False], default=math.inf)
    return list(range(int(least), int(most) + 1)) if most - least < 100 else None


def _kinds(parts: Iterable[dict[str, Any]]) -> set[str]:
    """Return the possible types of the values of a conjunction."""
    kinds = {*TYPES}
    for part in parts:
        named = part.get("type")
        named = [named] if isinstance(named, str) else named
        if isinstance(named, list):
            kinds &= types_named(named)
        values = _values([part])
        if values is not None:
            kinds &= set(map(type_of, values))
    return kinds
