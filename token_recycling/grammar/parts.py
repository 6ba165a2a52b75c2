"""The schemas within a schema, as they were written and as they are enforced, and what errors call their keywords."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from .json_values import escaped, is_number

IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentRequired", "dependentSchemas", "dependencies")
"""Keywords with schemas for the same value."""
_KEYWORDS = frozenset(
    (*IN_PLACE, "then", "else", "contains", "minContains", "maxContains", "$dynamicRef", "$recursiveRef", "type",
     "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
     "maxLength", "pattern", "format", "items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems",
     "maxItems", "uniqueItems", "properties", "patternProperties", "additionalProperties", "unevaluatedProperties",
     "propertyNames", "required", "minProperties", "maxProperties")
)  # fmt: skip
"""Those that are no annotations."""


def keywords(schema: Any) -> Set[str]:
    """Return the keywords of a schema that are no annotations, in its order."""
    return {name: None for name in schema if name in _KEYWORDS}.keys() if isinstance(schema, dict) else set()


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


def about(keyword: str) -> tuple[str, ...]:
    """Return the types of the values of which a keyword says something; none for a keyword about all values."""
    return next((types for types, names in _ABOUT.items() if keyword in names), ())


def is_count(value: Any) -> bool:
    """Whether a value is a number of characters, items or properties."""
    return is_number(value) and value >= 0 and value == int(value) and value < 2**32


_EXPRESSED: dict[str, tuple[str, ...]] = {
    "minimum": ("exclusiveMinimum", "format", "multipleOf"),
    "maximum": ("exclusiveMaximum", "format", "multipleOf"),
    "pattern": ("format",),
    "maxLength": ("format",),
    "prefixItems": ("items",),
    "items": ("additionalItems", "unevaluatedItems"),
    "maxItems": ("items", "additionalItems", "unevaluatedItems"),
    "enum": ("uniqueItems",),
    "patternProperties": ("propertyNames",),
    "additionalProperties": ("unevaluatedProperties", "propertyNames", "properties"),
    "properties": ("propertyNames",),
    "maxProperties": ("propertyNames",),
}
"""For keywords by which others are expressed, those."""


class Part(NamedTuple):
    """A schema within another."""

    place: str
    schema: dict[str, Any]
    """What of it can be enforced."""
    original: dict[str, Any]

    def pointer(self, keyword: str) -> str:
        """Return the place of a keyword of the schema, or of that which it expresses."""
        names = (keyword, *_EXPRESSED.get(keyword, (*IN_PLACE, "minProperties", "maxProperties", "format")))
        return f"{self.place}/{escaped(next((name for name in names if name in self.original), keyword))}"

    def no_value(self, keywords: Sequence[str], why: str) -> ValueError:
        """Return the error of a part that has no value; with one less of these `keywords` it had one."""
        first, *others = dict.fromkeys(map(self.pointer, sorted(keywords, key="type".__eq__))) or [self.place]
        beside = f" beside {', '.join(others)}" if others else ""
        why = why if len(why) <= 80 else f"{why[:77]}..."
        return ValueError(f"{first}: admits no value{beside}: {why}; correct the schema")
