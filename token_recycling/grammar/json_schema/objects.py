"""Keywords about objects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from .complement import either
from .disjoint import may_be_closed, names_if_closed
from .json_values import Schema, at_pointer, shown, strings, why_inexact
from .keywords import admits_everything, keywords
from .patterns import WRITABLE, before_a_newline, translated
from .walk import Node

_MAX_CHOICES = 50
"""Maximum number of choices of properties that express `minProperties` or `maxProperties`."""
_MAX_TOGETHER = 4
"""Maximum branches of `anyOf` next to `unevaluatedProperties`: each choice of branches is an alternative."""
_MAX_NAMES = {"properties": 2_000, "patternProperties": 50}
"""Maximum names and patterns of one object: time grows with the square of their number."""
_OF_NAMES = {"type", "pattern", "format", "enum", "const", "minLength", "maxLength"}
"""Keywords with which `propertyNames` can be expressed."""


def express(node: Node) -> None:
    """Express the keywords about objects."""
    if "object" not in node.kinds:
        return
    properties, patterns = _schemas_by_name(node, "properties"), _schemas_by_name(node, "patternProperties")
    if properties is not None:
        _properties(node, properties)
    _required(node)
    _other_properties(node)
    if patterns is not None:
        _pattern_properties(node, patterns)
    for name in ("minProperties", "maxProperties"):
        if (value := node.count(name)) is not None:
            node.own[name] = value
    _property_names(node)
    _number_of_properties(node)


def _schemas_by_name(node: Node, keyword: str) -> dict[str, Any] | None:
    """Return the schemas of a keyword by name."""
    schemas = node.get(keyword, lambda value: isinstance(value, dict), "an object")
    if schemas is not None and len(schemas) > _MAX_NAMES[keyword]:
        raise ValueError(f"{node.place}/{keyword}: at most {_MAX_NAMES[keyword]:,} are supported, got {len(schemas):,}")
    return schemas


def _properties(node: Node, properties: dict[str, Any]) -> None:
    node.own["properties"] = {}
    for name, schema in properties.items():
        if (why := why_inexact(name)) is not None:
            node.note("properties", why)
        node.own["properties"][name] = node.child(schema, "properties", name)


def _required(node: Node) -> None:
    required = node.get(
        "required",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names",
    )
    if required:
        reasons = [why for name in required if (why := why_inexact(name)) is not None]
        if reasons:
            node.note("required", reasons[0])
        else:
            node.own["required"] = list(dict.fromkeys(required))


def _other_properties(node: Node) -> None:
    """Express the schema of additional properties. If there is none, close the object if possible."""
    schema, own = node.schema, node.own
    if "additionalProperties" in schema:
        own["additionalProperties"] = node.child(schema["additionalProperties"], "additionalProperties")
    elif not admits_everything(schema.get("unevaluatedProperties", True)):
        _unevaluated_properties(node)
    elif node.closed and may_be_closed(schema):
        own["additionalProperties"] = False
        for name in names_if_closed(schema):
            own["properties"].setdefault(name, True)


def _unevaluated_properties(node: Node) -> None:
    """Express the schema of properties that no applicable schema evaluates: neither a valid branch of `anyOf` or
    `oneOf`, nor the other keywords.
    """
    schema, own = node.schema, node.own
    compositions = [name for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)]
    others = {name: part for name, part in schema.items() if name not in ("unevaluatedProperties", *compositions)}
    branches = [{"allOf": [others, branch]} for name in compositions for branch in schema[name]] or [others]
    evaluated = [node.walk.comparison.evaluated(branch, node.resource) for branch in branches]
    if None in evaluated or len(compositions) > 1:
        why = "is supported only with $ref, allOf, and one anyOf or oneOf, of schemas that list properties"
        node.note("unevaluatedProperties", why)
        return
    # A value may be valid under several branches of anyOf, and all of them evaluate properties.
    together = 1 if compositions == ["oneOf"] or node.exclusive(branches) else len(branches)
    if together > _MAX_TOGETHER:
        why = f"{_MAX_TOGETHER} branches, unless no value is valid under two of them"
        node.note("unevaluatedProperties", f"is supported next to anyOf only with at most {why}")
        return
    rest = node.child(schema["unevaluatedProperties"], "unevaluatedProperties")
    names = [listed or set() for listed in evaluated]
    if not compositions:
        own["additionalProperties"] = rest
        for name in sorted(names[0]):
            own.setdefault("properties", {}).setdefault(name, True)
        return
    for size in range(1, together + 1):
        for chosen in itertools.combinations(range(len(branches)), size):
            listed = dict.fromkeys(sorted(set[str]().union(*(names[number] for number in chosen))), True)
            node.within_branches[chosen] = {"properties": listed, "additionalProperties": rest}


# Names


def _pattern_properties(node: Node, patterns: dict[str, Any]) -> None:
    """Express `patternProperties`. A name that a pattern matches in only one dialect is excluded if additional
    properties are forbidden; if they are unconstrained, the name's value must satisfy the pattern's schema.
    """
    rest = node.own.get("additionalProperties", True)
    own = node.own["patternProperties"] = dict[str, Schema]()
    for pattern, schema in patterns.items():
        either = rest in (True, {})
        rust = node.translated("patternProperties", pattern, partial(translated, either=either))
        if rust is None:
            if node.own.pop("additionalProperties", None) is not None:
                node.note("additionalProperties", "does not apply to names of a pattern that is not enforced")
            rest = True
            continue
        own[rust] = node.child(schema, "patternProperties", pattern)
        if rest in (True, False, {}) or rust == translated(pattern, either=True):
            continue
        if (longer := before_a_newline(pattern)) is not None:
            own[longer] = False
        else:
            node.note("patternProperties", f"{shown(pattern)} matches different names in Python and ECMA-262")


def _property_names(node: Node) -> None:
    """Express `propertyNames` by `patternProperties` or `properties`."""
    own, names = node.own, node.get("propertyNames", lambda value: isinstance(value, dict | bool), "a schema")
    if names is None or admits_everything(names):
        return
    place, resource = f"{node.place}/propertyNames", node.resource
    if keywords(names) == {"$ref"} and (target := node.walk.references.resolved(names["$ref"], resource)) is not None:
        (place, resource), names = target, at_pointer(node.walk.document, target[0])
    told = node.walk.subschema(names, place, resource, closed=False) if keywords(names) <= _OF_NAMES else None
    if told is True or told == {"type": "string"}:
        return
    listing = _listing(told, own.get("additionalProperties", True)) if told else None
    if told is False:
        own["maxProperties"] = 0
    elif listing is None or "patternProperties" in own or "properties" in own:
        forms = "one of a pattern, most formats, constants or lengths"
        node.note("propertyNames", f"is supported only for {forms}, without properties and patternProperties")
    else:
        own.update(listing, additionalProperties=False)


def _listing(names: dict[str, Any], value: Schema) -> dict[str, Schema] | None:
    """Return the keyword for properties with these names and a value; None if the names cannot be expressed."""
    match {name: stated for name, stated in names.items() if (name, stated) != ("type", "string")}:
        case {"pattern": pattern, **others} if not others:
            return {"patternProperties": {pattern: value}}
        case {"enum": listed, **others} if not others:
            return {"properties": dict.fromkeys(strings(listed), value)}
        case {"const": str(name), **others} if not others:
            return {"properties": {name: value}}
        case lengths if lengths.keys() <= {"minLength", "maxLength"}:
            counts = f"{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}"
            return {"patternProperties": {f"^{WRITABLE}{{{counts}}}$": value}}
    return None


# Number of properties


def _number_of_properties(node: Node) -> None:
    """Express `minProperties` and `maxProperties`: for listed properties by choices of names, otherwise only as far as
    repeated names cannot reach the number.
    """
    own, required = node.own, node.own.get("required", ())
    optional = [
        name for name, schema in own.get("properties", {}).items() if schema is not False and name not in required
    ]
    least = own.get("minProperties", 0) - len(required)
    most = own.get("maxProperties", math.inf) - len(required)
    listed = own.get("additionalProperties") is False and not own.get("patternProperties")
    if least <= 0:
        own.pop("minProperties", None)
    elif listed:
        _choice_of_properties(node, "minProperties", optional, least, lambda names: {"required": names})
    elif least > 1:
        del own["minProperties"]
        node.note("minProperties", "above 1 is not supported unless all names are listed: a name could be repeated")
    elif 0 < len(optional) < _MAX_CHOICES:
        # llguidance counts properties only if all listed properties are required or forbidden.
        further = {"properties": dict.fromkeys(optional, False), "minProperties": own.pop("minProperties")}
        node.others.append(either([*({"required": [name]} for name in optional), further]))
    if listed and most >= len(optional):
        own.pop("maxProperties", None)
    elif listed and most >= 0:
        missing = len(optional) - int(most)
        _choice_of_properties(
            node, "maxProperties", optional, missing, lambda names: {"properties": dict.fromkeys(names, False)}
        )


def _choice_of_properties(
    node: Node, keyword: str, names: list[str], number: int, holds: Callable[[list[str]], Schema]
) -> None:
    """Express a keyword as a schema that holds for at least one choice of `number` names."""
    del node.own[keyword]
    if math.comb(len(names), number) > _MAX_CHOICES:
        node.note(keyword, f"is supported only if at most {_MAX_CHOICES} choices of names satisfy it")
    else:
        choices = [holds([*chosen]) for chosen in itertools.combinations(names, number)]
        node.others.append(either(choices or node.of_other_types("object")))
