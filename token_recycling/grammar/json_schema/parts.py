"""The schemas within a schema, as they were written and as they are enforced, and what errors call their keywords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .json_values import escaped
from .keywords import IN_PLACE

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
        names = (keyword, *_EXPRESSED.get(keyword, (*IN_PLACE, "contains", "minProperties", "maxProperties", "format")))
        return f"{self.place}/{escaped(next((name for name in names if name in self.original), keyword))}"

    def no_value(self, keywords: Sequence[str], why: str) -> ValueError:
        """Return the error of a part that has no value; with one less of these `keywords` it had one."""
        first, *others = dict.fromkeys(map(self.pointer, sorted(keywords, key="type".__eq__))) or [self.place]
        beside = f" beside {', '.join(others)}" if others else ""
        why = why if len(why) <= 80 else f"{why[:77]}..."
        return ValueError(f"{first}: admits no value{beside}: {why}; correct the schema")
