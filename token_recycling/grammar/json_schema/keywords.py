"""Keywords of JSON Schema: their names, their first drafts, and the types of values that they constrain."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

IN_PLACE = (
    "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired",
    "dependentSchemas", "dependencies",
)  # fmt: skip
"""Keywords with schemas for the same value."""
_ABOUT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("number", "integer"): ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    ("string",): ("minLength", "maxLength", "pattern"),
    ("array",): (
        "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems",
        "contains", "minContains", "maxContains",
    ),
    ("object",): (
        "properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames", "required",
        "minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies",
    ),
}  # fmt: skip
_ABOUT_ALL = ("type", "enum", "const", "format", "then", "else")
_KEYWORDS = frozenset((*IN_PLACE, *_ABOUT_ALL, *(name for names in _ABOUT.values() for name in names)))
"""Keywords other than annotations."""
WITH_SCHEMAS = {
    "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "items", "prefixItems", "additionalItems",
    "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties", "propertyNames",
}  # fmt: skip
"""Keywords whose value is a schema or a list of schemas."""
WITH_NAMED_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions"}
SINCE = {
    "const": "06",
    "contains": "06",
    "if": "07",
    "minContains": "2019-09",
    "maxContains": "2019-09",
    "prefixItems": "2020-12",
}
"""The first draft of keywords that change the meaning of others: validators of earlier drafts ignore them."""


def keywords(schema: Any) -> Set[str]:
    """Return the keywords of a schema except annotations, in its order."""
    return {name: None for name in schema if name in _KEYWORDS}.keys() if isinstance(schema, dict) else set()


def about(keyword: str) -> tuple[str, ...]:
    """Return the types of values that a keyword constrains; () for a keyword about all values."""
    return next((types for types, names in _ABOUT.items() if keyword in names), ())


def admits_everything(schema: Any) -> bool:
    """Return whether a schema is `true` or `{}`, which admit every value."""
    return schema is True or schema == {}
