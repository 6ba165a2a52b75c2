"""The walk over the schemas of a document, and the node of each schema with its enforceable keywords."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urldefrag

from .complement import Complements
from .disjoint import Comparison
from .errors import Part, Unenforced
from .json_values import TYPES, Schema, at_pointer, escaped, is_count, shown
from .keywords import IN_PLACE, SINCE, keywords
from .references import References, is_resource

MAX_DEPTH, MAX_NODES = 100, 50_000
"""Maximum nesting depth and number of schemas; each costs a few microseconds."""

Translation = TypeVar("Translation")


class Walk:
    """One pass over all schemas of a document that can be reached from its root."""

    def __init__(self, document: Schema, closing: bool, express: Sequence[Callable[[Node], None]]) -> None:
        """`closing`: whether to close objects where possible; `express`: functions that each express some keywords of a
        node.
        """
        self.document, self.closing, self._express = document, closing, express
        self.unenforced: list[Unenforced] = []
        self.parts: list[Part] = []
        """All schemas, the innermost first."""
        self.references = References(document)
        self.comparison = Comparison(document, self.references)
        self.complements = Complements(document, self.references, self.comparison)
        self._names: dict[tuple[str, bool], str] = {}
        """The names of definitions, by place and by whether their objects are closed."""
        self._pending: list[tuple[str, str, bool]] = []
        """The definitions that have not been walked yet: place, resource, and whether their objects are closed."""
        self._nodes = 0

    def result(self) -> Schema:
        """Return the enforceable part of the document, with referenced schemas in `$defs`."""
        self._check_dialect()
        root, definitions = self.subschema(self.document, "#", "#", self.closing), dict[str, Schema]()
        while self._pending:
            place, resource, closed = self._pending.pop()
            schema = at_pointer(self.document, place)
            definitions[self._names[place, closed]] = self.subschema(schema, place, resource, closed)
        if isinstance(root, dict) and definitions:
            root["$defs"] = definitions
        return root

    def _check_dialect(self) -> None:
        """Note an invalid or unsupported dialect in `$schema`."""
        named = self.document.get("$schema", "") if isinstance(self.document, dict) else ""
        if not isinstance(named, str):
            self.note("#", "$schema", f"must be a string, got {shown(named)}", mistaken=True)
        elif self.references.draft < "04":
            self.note("#", "$schema", f"draft {self.references.draft} is not supported; use draft 04 or later")

    def note(self, place: str, keyword: str, why: str, mistaken: bool = False) -> None:
        """List a keyword as unenforced, without repetition."""
        entry = Unenforced(f"{place}/{escaped(keyword)}", why, mistaken)
        if entry not in self.unenforced[-50:]:
            self.unenforced.append(entry)

    def subschema(self, schema: Any, place: str, resource: str, closed: bool) -> Schema:
        """Return the enforceable part of a schema; `resource`: the place of the schema with its base URI; `closed`:
        whether its objects may be closed.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{place}: a schema must be an object or a boolean, got {shown(schema)}")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise ValueError(f"the schema has more than {MAX_NODES:,} parts; make it smaller")
        if place.count("/") > MAX_DEPTH:
            raise ValueError(
                f"{place[:80]}...: schemas are nested more than {MAX_DEPTH} levels deep; reduce the nesting"
            )
        if place != "#" and is_resource(schema):
            resource = place
        node = Node(self, schema, place, resource, closed)
        for express in self._express:
            express(node)
        return node.result()

    def definition(self, place: str, resource: str, closed: bool) -> Schema:
        """Return a reference to the schema at a place, which becomes a definition."""
        name = self._names.get((place, closed))
        if name is None:
            name = self._names[place, closed] = str(len(self._names))
            self._pending.append((place, resource, closed))
        return {"$ref": f"#/$defs/{name}"}


class Node:
    """One schema and its enforceable part: its own keywords, and further schemas for the same value."""

    def __init__(self, walk: Walk, schema: dict[str, Any], place: str, resource: str, closed: bool) -> None:
        self.walk, self.schema, self.place, self.resource, self.closed = walk, schema, place, resource, closed
        self.own: dict[str, Any] = {}
        """Its enforceable keywords, except those with schemas for the same value."""
        self.others: list[Schema] = []
        """Further schemas for the same value."""
        self.kinds = {*TYPES}
        """The possible types of its values."""
        self.in_place = [name for name in IN_PLACE if name in schema]
        """Its keywords with schemas for the same value."""
        self.within_branches: dict[tuple[int, ...], Schema] = {}
        """Additional schemas for values that are valid under some branches of its `anyOf` or `oneOf`, by the indices of
        these; empty if values may be valid under any branch.
        """
        for keyword in SINCE:
            if keyword in schema and not walk.references.knows(keyword):
                self.note(keyword, f"is not a keyword of draft {walk.references.draft}, which $schema names")

    def result(self) -> Schema:
        """Return its own keywords together with the further schemas."""
        if self.own:
            self.walk.parts.append(Part(self.place, self.own, self.schema))
        result = self._conjunction()
        if isinstance(result, dict) and result is not self.own:
            self.walk.parts.append(Part(self.place, result, self.schema))
        return result

    def _conjunction(self) -> Schema:
        own, others = self.own, [other for other in self.others if other is not True]
        if not others:
            return own or True
        if not own:
            return others[0] if len(others) == 1 else {"allOf": others}
        stated = [name for name in self.schema if name == "properties" or name in IN_PLACE]
        if next(iter(self.schema)) in IN_PLACE or "properties" in stated[1:]:
            return {"allOf": [*others, own]}
        own["allOf"] = others
        return own

    # Used by the functions that express keywords

    def note(self, keyword: str, why: str, mistaken: bool = False) -> None:
        """List a keyword as unenforced."""
        self.walk.note(self.place, keyword, why, mistaken)

    def get(self, keyword: str, valid: Callable[[Any], bool], what: str) -> Any:
        """Return the value of a keyword; None if it is missing or invalid. An invalid value is noted."""
        value = self.schema.get(keyword)
        if keyword not in self.schema or valid(value):
            return value
        self.note(keyword, f"must be {what}, got {shown(value)}", mistaken=True)
        return None

    def count(self, keyword: str) -> int | None:
        """Return the value of a keyword that counts characters, items or properties."""
        value = self.get(keyword, is_count, "a whole number below 2**32")
        return None if value is None else int(value)

    def translated(self, keyword: str, pattern: str, translate: Callable[[str], Translation]) -> Translation | None:
        """Return a keyword's pattern in Rust's syntax; None, with a note, if it has no translation."""
        try:
            return translate(pattern)
        except ValueError as error:
            self.note(keyword, f"{shown(pattern)}: {error}")
            return None

    def child(self, schema: Any, *names: str | int, closed: bool = True) -> Schema:
        """Return the enforceable part of a subschema; `names`: its path from this schema."""
        place = "/".join([self.place, *(escaped(str(name)) for name in names)])
        return self.walk.subschema(schema, place, self.resource, closed and self.walk.closing)

    def definition(self, keyword: str) -> Schema:
        """Return a reference to the schema of a keyword, for repeated use."""
        return self.walk.definition(f"{self.place}/{keyword}", self.resource, closed=False)

    def reference(self, keyword: str) -> Schema | None:
        """Return a reference to the schema that a keyword names; None, with a note, if there is none, or if it depends
        on earlier references.
        """
        reference = self.schema[keyword]
        if keyword != "$ref" and not self.walk.references.is_static(reference):
            self.note(keyword, "is supported only if one schema has the anchor, or the document has one $id")
            return None
        target = self.walk.references.resolved(reference, self.resource)
        if target is not None:
            return self.walk.definition(*target, closed=self.closed and self.is_only(keyword))
        if isinstance(reference, str):
            external = bool(urldefrag(reference).url)
            why = f"{shown(reference)} refers to {'another document' if external else 'nothing in the schema'}"
        else:
            why = f"must be a string, got {shown(reference)}"
        self.note(keyword, why, mistaken=True)
        return None

    def of_other_types(self, *kinds: str) -> list[Schema]:
        """Return the schema of its values of other types than `kinds`, in a list that is empty if there are none."""
        others = self.kinds - {*kinds} - ({"integer"} if "number" in self.kinds else set())
        return [{"type": sorted(others)}] if others else []

    def is_only(self, keyword: str) -> bool:
        """Return whether the schema has no other keyword, except perhaps `type`."""
        return keywords(self.schema) - {"type"} == {keyword}

    def exclusive(self, schemas: Sequence[Any], written: Sequence[Any] = ()) -> bool:
        """Return whether it is certain that no value is valid under two of the subschemas; `written`: for each, a
        schema of the values that outputs may have, if narrower.
        """
        return self.walk.comparison.exclusive(schemas, self.resource, written)

    def constrains_only_objects(self, schema: Any) -> bool:
        """Return whether a subschema constrains objects and nothing else."""
        return self.walk.comparison.constrains_only_objects(schema, self.resource)

    def closed_objects(self, schema: Any) -> Schema:
        """Return a subschema with its objects closed, if possible."""
        return self.walk.comparison.closed(schema, self.resource)

    def complement(self, schema: Any, beside: Schema = True) -> Schema | None:
        """Return the schema of values of this schema and of `beside` that are invalid under `schema`; None if it cannot
        be expressed.
        """
        return self.walk.complements.of(schema, {"allOf": [self.schema, beside]}, self.resource)

    def lacking(self, schema: Any, other: Any) -> Schema | None:
        """Return the schema of values that lack a property required by the subschema `schema` but not by `other`; None
        if there is no such property.
        """
        return self.walk.complements.lacking(schema, other, self.resource)
