"""The walk over the schemas of a document, and each of them on the way with its keywords that can be enforced."""

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
"""Most levels that schemas are nested, and schemas in one; each costs some microseconds."""

Translation = TypeVar("Translation")


class Walk:
    """One pass over the schemas of a document that its root refers to."""

    def __init__(self, document: Schema, closing: bool, express: Sequence[Callable[[Node], None]]) -> None:
        """`closing`: whether objects are closed where they may be; `express`: functions which each express some
        keywords of a node.
        """
        self.document, self.closing, self._express = document, closing, express
        self.unenforced: list[Unenforced] = []
        self.parts: list[Part] = []
        """Every schema, the innermost first."""
        self.references = References(document)
        self.comparison = Comparison(document, self.references)
        self.complements = Complements(document, self.references, self.comparison)
        self._names: dict[tuple[str, bool], str] = {}
        """For each place that is referred to, and whether its objects are closed, its name among the definitions."""
        self._pending: list[tuple[str, str, bool]] = []
        """The definitions that are still to be walked: place, resource, and whether their objects are closed."""
        self._nodes = 0

    def result(self) -> Schema:
        """Return the document as it can be enforced, with the schemas that others refer to as `$defs`."""
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
        """Note a dialect that is none, or has other keywords than those known here."""
        named = self.document.get("$schema", "") if isinstance(self.document, dict) else ""
        if not isinstance(named, str):
            self.note("#", "$schema", f"must be a string, got {shown(named)}", mistaken=True)
        elif self.references.draft < "04":
            self.note("#", "$schema", f"draft {self.references.draft} is not supported; drafts from 04 on are")

    def note(self, place: str, keyword: str, why: str, mistaken: bool = False) -> None:
        """List a keyword as unenforced, once."""
        entry = Unenforced(f"{place}/{escaped(keyword)}", why, mistaken)
        if entry not in self.unenforced[-50:]:
            self.unenforced.append(entry)

    def subschema(self, schema: Any, place: str, resource: str, closed: bool) -> Schema:
        """Return one schema as it can be enforced; `resource`: the place of the schema whose base URI it has; `closed`:
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
            raise ValueError(f"{place[:80]}...: schemas are nested in more than {MAX_DEPTH} levels; nest fewer")
        if place != "#" and is_resource(schema):
            resource = place
        node = Node(self, schema, place, resource, closed)
        for express in self._express:
            express(node)
        return node.result()

    def definition(self, place: str, resource: str, closed: bool) -> Schema:
        """Return a reference to the schema at a place, which will be one of the definitions."""
        name = self._names.get((place, closed))
        if name is None:
            name = self._names[place, closed] = str(len(self._names))
            self._pending.append((place, resource, closed))
        return {"$ref": f"#/$defs/{name}"}


class Node:
    """One schema, and what of it can be enforced: one schema of its own keywords, and others for the same value."""

    def __init__(self, walk: Walk, schema: dict[str, Any], place: str, resource: str, closed: bool) -> None:
        self.walk, self.schema, self.place, self.resource, self.closed = walk, schema, place, resource, closed
        self.own: dict[str, Any] = {}
        """Its keywords about values themselves."""
        self.others: list[Schema] = []
        """Schemas for the same value."""
        self.kinds = {*TYPES}
        """The types that its values may have."""
        self.in_place = [name for name in IN_PLACE if name in schema]
        """Its keywords with schemas for the same value."""
        self.within_branches: list[Schema] = []
        """For each branch of its `anyOf` or `oneOf` what else holds for the values of it, if anything does."""
        for keyword in SINCE:
            if keyword in schema and not walk.references.knows(keyword):
                self.note(keyword, f"is no keyword of draft {walk.references.draft}, which $schema names")

    def result(self) -> Schema:
        """Return its keywords together with the schemas for the same value."""
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
        if next(iter(self.schema)) in IN_PLACE:
            return {"allOf": [*others, own]}
        own["allOf"] = others
        return own

    # What the functions that express keywords ask

    def note(self, keyword: str, why: str, mistaken: bool = False) -> None:
        """List a keyword as unenforced."""
        self.walk.note(self.place, keyword, why, mistaken)

    def get(self, keyword: str, valid: Callable[[Any], bool], what: str) -> Any:
        """Return the value of a keyword; None if it is missing, or is none of those that are valid, which is noted."""
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
        """Return a pattern of a keyword in Rust's syntax; None if it has no translation, which is noted."""
        try:
            return translate(pattern)
        except ValueError as error:
            self.note(keyword, f"{shown(pattern)}: {error}")
            return None

    def child(self, schema: Any, *names: str | int, closed: bool = True) -> Schema:
        """Return a schema within this one as it can be enforced; `names` lead to it."""
        place = "/".join([self.place, *(escaped(str(name)) for name in names)])
        return self.walk.subschema(schema, place, self.resource, closed and self.walk.closing)

    def definition(self, keyword: str) -> Schema:
        """Return a reference to the schema of a keyword, for where it is needed many times."""
        return self.walk.definition(f"{self.place}/{keyword}", self.resource, closed=False)

    def reference(self, keyword: str) -> Schema | None:
        """Return a reference to the schema that a keyword names; None, which is noted, if there is none, or if it
        depends on the references before.
        """
        reference = self.schema[keyword]
        if keyword != "$ref" and not self.walk.references.is_static(reference):
            self.note(keyword, "is supported where one schema alone has the anchor or the document has one $id")
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

    def is_only(self, keyword: str) -> bool:
        """Whether it has no other keyword than perhaps `type`."""
        return keywords(self.schema) - {"type"} == {keyword}

    def exclusive(self, schemas: Sequence[Any], written: Sequence[Any] = ()) -> bool:
        """Whether it is certain that no value is valid under two of some schemas within this one; `written`: schemas of
        the values that are written for each, if not all are.
        """
        return self.walk.comparison.exclusive(schemas, self.resource, written)

    def is_about_objects(self, schema: Any) -> bool:
        """Whether a schema within this one says something, and of objects alone."""
        return self.walk.comparison.is_about_objects(schema, self.resource)

    def closed_objects(self, schema: Any) -> Schema:
        """Return a schema within this one whose objects are closed if they may be."""
        return self.walk.comparison.closed(schema, self.resource)

    def complement(self, schema: Any, beside: Schema = True) -> Schema | None:
        """Return the schema of those values of this schema, and of another, that are not valid under a third; None
        where it cannot be expressed.
        """
        return self.walk.complements.of(schema, {"allOf": [self.schema, beside]}, self.resource)

    def lacking(self, schema: Any, other: Any) -> Schema | None:
        """Return the schema of values that lack a property which one schema within this one requires, and another does
        not; None where it requires no more.
        """
        return self.walk.complements.lacking(schema, other, self.resource)
