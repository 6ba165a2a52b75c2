"""References within a JSON schema: to places, to `$id`s and to anchors (draft 2020-12, 8.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from .json_values import at_pointer, escaped
from .keywords import SINCE, WITH_NAMED_SCHEMAS, WITH_SCHEMAS


class References:
    """Resolves the references of a document."""

    def __init__(self, document: Any) -> None:
        self._document = document

    @cached_property
    def draft(self) -> str:
        """The draft that the document declares, such as `2019-09` or `07`; 2020-12 by default."""
        dialect = self._document.get("$schema") if isinstance(self._document, dict) else None
        named = re.search(r"/draft[-/](0[0-7]|20[0-9]{2}-[0-9]{2})/", dialect) if isinstance(dialect, str) else None
        return named[1] if named else "2020-12"

    def knows(self, keyword: str) -> bool:
        """Return whether the draft has a keyword."""
        return self.draft >= SINCE.get(keyword, "")

    def effective(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return the keywords of a schema that have effect: before draft 2019-09, `$ref` hides its siblings."""
        return {"$ref": schema["$ref"]} if self.draft < "2019-09" and "$ref" in schema else schema

    def resolved(self, reference: Any, resource: str) -> tuple[str, str] | None:
        """Return the place that a reference within a resource refers to, and its resource; None if there is none."""
        if not isinstance(reference, str):
            return None
        url, fragment = urldefrag(reference)
        if url:
            base = self.anchors.get(urljoin(_id(self._document), url))
            if base is None:
                return None
            resource = base[0]
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self.anchors.get(f"{resource} {fragment}")
        place = resource + fragment
        schema = at_pointer(self._document, place)
        if not isinstance(schema, dict | bool):
            return None
        parts, above = place.split("/"), self._document
        for number in range(1, len(parts)):
            above = at_pointer(self._document, "/".join(parts[: number + 1]))
            if isinstance(above, dict) and is_resource(above):
                resource = "/".join(parts[: number + 1])
        return place, resource

    def is_static(self, reference: Any) -> bool:
        """Return whether a `$dynamicRef` or `$recursiveRef` refers to the same schema in every dynamic scope."""
        name = unquote(urldefrag(reference).fragment) if isinstance(reference, str) else ""
        named = [place for key, place in self.anchors.items() if key.endswith(f" {name}")]
        return len(named) == 1 if name and not name.startswith("/") else not self.has_resources

    @cached_property
    def has_resources(self) -> bool:
        """Whether some references are relative to a subschema instead of the document."""
        return any(place != "#" for _, place in self.anchors.values())

    @cached_property
    def anchors(self) -> dict[str, tuple[str, str]]:
        """Places with `$id` by URL, and with `$anchor` by resource and name, each with its resource."""
        anchors: dict[str, tuple[str, str]] = {}
        base = _id(self._document)
        if base:
            anchors[urldefrag(base).url] = ("#", "#")
        left: list[tuple[Any, str, str, str]] = [(self._document, "#", "#", base)]
        while left:
            value, place, resource, base = left.pop()
            if isinstance(value, list):
                left.extend((part, f"{place}/{number}", resource, base) for number, part in enumerate(value))
            if not isinstance(value, dict):
                continue
            if place != "#" and is_resource(value):
                resource, base = place, urljoin(base, _id(value))
                anchors[urldefrag(base).url] = (place, place)
            for name in ("$anchor", "$dynamicAnchor"):
                if isinstance(value.get(name), str):
                    anchors[f"{resource} {value[name]}"] = (place, resource)
            if _id(value).startswith("#"):
                anchors[f"{resource} {_id(value)[1:]}"] = (place, resource)
            left.extend((part, f"{place}/{path}", resource, base) for path, part in _subschemas(value))
        return anchors


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the places and values of a schema's keywords that contain subschemas: `$id` is only valid there."""
    for keyword, value in schema.items():
        if keyword in WITH_SCHEMAS:
            yield keyword, value
        elif keyword in WITH_NAMED_SCHEMAS and isinstance(value, dict):
            for name, part in value.items():
                yield f"{keyword}/{escaped(name)}", part


def _id(schema: Any) -> str:
    name = schema.get("$id", schema.get("id")) if isinstance(schema, dict) else None
    return name if isinstance(name, str) else ""


def is_resource(schema: dict[str, Any]) -> bool:
    """Return whether references within a schema are relative to it."""
    name = schema.get("$id")
    return isinstance(name, str) and not name.startswith("#")
