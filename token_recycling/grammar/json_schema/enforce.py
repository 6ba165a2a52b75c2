"""The enforceable part of a schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import arrays, in_place, objects, scalars
from .endless import prune
from .errors import Part, Unenforced
from .json_values import Schema
from .walk import Walk

_EXPRESS = (scalars.express, arrays.express, objects.express, in_place.express)


@dataclass
class Enforceable:
    """A schema with only enforceable keywords."""

    schema: Schema
    unenforced: list[Unenforced]
    """The keywords that were left out."""
    parts: list[Part]
    """All subschemas, the innermost first."""

    @property
    def definitions(self) -> dict[str, Any]:
        """The schemas that are referred to, by name."""
        return self.schema.get("$defs", {}) if isinstance(self.schema, dict) else {}


def enforceable(schema: Schema, closed: bool) -> Enforceable:
    """Return the enforceable part of a schema.

    If `closed`, objects with `properties` exclude additional properties unless the schema allows them. Raise ValueError
    for an invalid schema, one that is too large, or one whose values would never end.
    """
    walk = Walk(schema, closed, _EXPRESS)
    root = walk.result()
    if isinstance(root, dict):
        prune(root, walk.parts)
    return Enforceable(root, walk.unenforced, walk.parts)
