"""A schema, and what of it can be enforced."""

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
    """A schema with only keywords that can be enforced."""

    schema: Schema
    unenforced: list[Unenforced]
    """The others."""
    parts: list[Part]
    """Every schema within it, the innermost first."""

    @property
    def definitions(self) -> dict[str, Any]:
        """The schemas that others refer to, by name."""
        return self.schema.get("$defs", {}) if isinstance(self.schema, dict) else {}


def enforceable(schema: Schema, closed: bool) -> Enforceable:
    """Return the schema as far as it can be enforced.

    If `closed`, objects with `properties` have no others unless the schema says so. Raise ValueError for a schema that
    is none, is too large, or whose values would never end.
    """
    walk = Walk(schema, closed, _EXPRESS)
    root = walk.result()
    if isinstance(root, dict):
        prune(root, walk.parts)
    return Enforceable(root, walk.unenforced, walk.parts)
