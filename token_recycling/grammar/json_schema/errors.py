"""Errors about schemas: keywords that cannot be enforced, and parts without a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .json_values import escaped, unescaped
from .keywords import IN_PLACE


class Unenforced(NamedTuple):
    """A keyword that is not enforced."""

    place: str
    """JSON pointer to the keyword, as a fragment."""
    why: str
    mistaken: bool = False
    """Whether the keyword itself is invalid: its value is of the wrong kind, or refers to nothing."""

    @property
    def keyword(self) -> str:
        """The name of the keyword."""
        return unescaped(self.place.rpartition("/")[2])

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


class UnenforceableError(ValueError):
    """A schema with invalid keywords, or with keywords that must be enforced but cannot be."""

    def __init__(self, unenforced: Sequence[Unenforced]) -> None:
        shown = "; ".join(map(str, unenforced[:5])) + ("; ..." if len(unenforced) > 5 else "")
        fix = "correct the schema" if unenforced[0].mistaken else "omit these keywords, or set strict to false"
        super().__init__(f"{shown}; {fix}")
        self.unenforced = unenforced


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
"""For each keyword, the other keywords that may be expressed by it."""
_EXPRESSED_BY_ANY = (*IN_PLACE, "contains", "minProperties", "maxProperties", "format", "multipleOf")
"""Keywords that may be expressed by any other keyword."""


class Part(NamedTuple):
    """A subschema of a document."""

    place: str
    schema: dict[str, Any]
    """The enforceable keywords."""
    original: dict[str, Any]

    def pointer(self, keyword: str) -> str:
        """Return the JSON pointer to a keyword of the schema, or to the original keyword that it expresses."""
        names = (keyword, *_EXPRESSED.get(keyword, _EXPRESSED_BY_ANY))
        return f"{self.place}/{escaped(next((name for name in names if name in self.original), keyword))}"

    def no_value(self, keywords: Sequence[str], why: str) -> ValueError:
        """Return the error of a part without a value; without any one of these `keywords` it would have one."""
        first, *others = dict.fromkeys(map(self.pointer, sorted(keywords, key="type".__eq__))) or [self.place]
        beside = f" with {', '.join(others)}" if others else ""
        return ValueError(f"{first}: admits no value{beside}: {shortened(why)}; correct the schema")


def shortened(why: str) -> str:
    """Return at most 80 characters of a reason: llguidance's may quote a whole expression."""
    return why if len(why) <= 80 else f"{why[:77]}..."
