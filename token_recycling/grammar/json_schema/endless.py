"""Removes schemas whose values would have to contain themselves endlessly, through recursive references. llguidance
expands references one by one, so an output could begin such a value and never end it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from .errors import Part
from .json_values import Schema


def prune(schema: dict[str, Any], parts: Sequence[Part]) -> None:
    """Replace unsatisfiable subschemas of a schema, which may have `$defs`, by False. Raise ValueError if no value can
    satisfy the whole schema. `parts`: its subschemas.
    """
    definitions = schema.get("$defs", {})
    ending = _ending(definitions)
    if not _can_end(schema, ending):
        part = next(part for part in parts if not _can_end(part.schema, ending))
        keywords = [name for name in part.schema if _can_end(_without(part.schema, name), ending)]
        raise part.no_value(keywords, "a required part has none, or contains itself endlessly")
    if len(ending) < len(definitions):
        _pruned(schema, ending)


def _without(schema: dict[str, Any], keyword: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name != keyword}


def _ending(definitions: dict[str, Schema]) -> set[str]:
    """Return the names of the definitions that a finite value can satisfy."""
    ending: set[str] = set()
    while True:
        more = {name for name, schema in definitions.items() if name not in ending and _can_end(schema, ending)}
        if not more:
            return ending
        ending |= more


def _can_end(schema: Schema, ending: Set[str]) -> bool:
    """Return whether a finite value can satisfy a schema that may refer only to the definitions `ending`."""
    if isinstance(schema, bool) or "enum" in schema or "const" in schema:
        return schema is not False
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ending:
        return False
    if not all(_can_end(part, ending) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_can_end(part, ending) for part in schema["anyOf"]):
        return False
    if schema.get("type") in ("object", ["object"]):
        properties, required = schema.get("properties", {}), schema.get("required", ())
        others = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties", True)]
        rest = any(_can_end(part, ending) for part in others)
        if not all(_can_end(properties[name], ending) if name in properties else rest for name in required):
            return False
        return not schema.get("minProperties") or rest or any(_can_end(part, ending) for part in properties.values())
    if schema.get("type") in ("array", ["array"]):
        items = [*schema.get("prefixItems", ()), schema.get("items", True)][: schema.get("minItems", 0)]
        return all(_can_end(item, ending) for item in items)
    return True


def _pruned(schema: Schema, ending: Set[str]) -> Schema:
    """Prune a schema in place; return it, or False if no value can satisfy it."""
    if isinstance(schema, bool):
        return schema
    for keyword, value in schema.items():
        if keyword in ("properties", "patternProperties", "$defs"):
            schema[keyword] = {name: _pruned(part, ending) for name, part in value.items()}
        elif keyword in ("allOf", "anyOf", "prefixItems"):
            schema[keyword] = [_pruned(part, ending) for part in value]
        elif keyword in ("items", "additionalProperties"):
            schema[keyword] = _pruned(value, ending)
    return _can_end(schema, ending) and schema
