"""What a JSON schema does not admit, as a schema: for `not`, for `if`, and for `oneOf` whose branches share values.

llguidance has no complement. But a schema is a conjunction of keywords, so that its complement is what any of them
excludes: other types, other constants, a property that is missing or has another value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .json_values import TYPES, Schema, kind_of, strings, unwritable
from .parts import keywords
from .patterns import excluding

_SINGLE = ("null", "boolean", "string")
"""Types of constants of which the other values of the type can be told."""


def complement(schema: Any, draft: str) -> Schema | None:
    """Return the schema of the values that are not valid under another, in keywords that are enforced; None where it
    cannot be expressed. `draft`: that of the document.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        return None
    return _all_known(either, (_excluded(name, schema[name], draft) for name in keywords(schema)))


def _excluded(keyword: str, value: Any, draft: str) -> Schema | None:
    """Return the schema of the values that a keyword excludes."""
    match keyword, value:
        case "type", str() | list():
            return _of_other_types([value] if isinstance(value, str) else value)
        case "enum", list():
            return _other_values(value)
        case "const", _ if draft >= "06":
            return _other_values([value])
        case "required", list() if strings(value) == value and unwritable(value) is None:
            return either(_lacking(name) for name in value)
        case "properties", dict():
            others = {name: complement(part, draft) for name, part in value.items()}
            return _all_known(either, (_with_property(name, other) for name, other in others.items()))
        case "anyOf", list():
            return _all_known(both, (complement(part, draft) for part in value))
        case "allOf", list():
            return _all_known(either, (complement(part, draft) for part in value))
        case _:
            return None


def _all_known(combine: Any, schemas: Iterable[Schema | None]) -> Schema | None:
    known = list(schemas)
    return None if None in known else combine(known)


def _of_other_types(kinds: list[Any]) -> Schema | None:
    if not all(kind in TYPES for kind in kinds) or ("integer" in kinds and "number" not in kinds):
        return None
    left = [kind for kind in TYPES if kind not in (*kinds, "integer")]
    return {"type": left} if left else False


def _other_values(values: list[Any]) -> Schema | None:
    kinds = {kind_of(value) for value in values}
    if not kinds <= {*_SINGLE} or unwritable(values) is not None:
        return None
    left: list[Schema | None] = [_of_other_types([*kinds])]
    if "boolean" in kinds:
        left += [{"const": value} for value in (False, True) if value not in values]
    if "string" in kinds:
        pattern = excluding(strings(values))
        left.append(None if pattern is None else {"type": "string", "pattern": pattern})
    return _all_known(either, left)


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
