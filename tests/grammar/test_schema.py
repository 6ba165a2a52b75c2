"""Strict JSON schemas admit only outputs that `jsonschema` validates, or are refused by the path of a keyword."""

from __future__ import annotations

import contextlib
import json
import random
from itertools import chain, product
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from support.byte_grammars import admits, byte_tokenizer, random_output
from support.strategies import fuzz

from token_recycling.grammar import compile as compiling
from token_recycling.grammar.compile import compiled
from token_recycling.grammar.json_schema.enforce import enforceable
from token_recycling.grammar.json_schema.errors import UnenforceableError
from token_recycling.grammar.json_schema.walk import MAX_DEPTH

TOKENIZER = byte_tokenizer()
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 5, 6, 7, 10, 99, 100, 101, 0.5, 1.5, 2.5, -0.5, 9007199254740992,
    "", "a", "b", "ab", "abc", "abcd", "foo", "é", "\n", "x" * 8, "2024-02-29", "2023-02-29", "1.2.3.4", "a@b.c",
    "2024-01-31T10:00:00Z", [], [1], [1, 2], [1, 1], ["a"], ["a", 1], [None], [[1]], [1, "a", True], [1, 2, 3],
    {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"b": "x"}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": "x"}, {"a": None},
    {"c": 1}, {"a": 1, "c": 2}, {"abc": 1}, {"abc": "x"}, {"x1": 1}, {"a": {"a": 1}}, {"a": {"b": "x"}}, {"a": [1, 2]},
]  # fmt: skip
INTEGER = {"$defs": {"i": {"type": "integer"}, "a/b c": {"type": "integer"}, "n": {"$anchor": "named", "const": 7}}}
ENFORCED: list[dict[str, Any]] = [
    {"type": "string"}, {"type": "integer"}, {"type": ["integer", "null"]}, {"type": ["number", "integer"]}, {},
    {"pattern": "^a"}, {"pattern": "^(?=.*b)(?!b)[a-d]+$"}, {"contains": {"type": "integer"}, "maxItems": 3},
    {"pattern": "^a[\\x00-\\x7f]b$"}, {"pattern": "^a\\x01?$"},
    {"maxLength": 3}, {"minLength": 2}, {"minimum": 100}, {"maximum": 1}, {"exclusiveMinimum": 5},
    {"minimum": 5, "exclusiveMinimum": True}, {"exclusiveMinimum": True}, {"maximum": 5, "exclusiveMaximum": False},
    {"minimum": 5, "anyOf": [{"type": "number"}], "exclusiveMinimum": True},
    {"contains": {"type": "integer"}}, {"contains": {"const": 1}, "minContains": 2, "type": "array"},
    {"multipleOf": 0.1, "minimum": 0, "maximum": 2}, {"multipleOf": 50_000, "minimum": 0, "maximum": 100_000},
    {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 1e300}, {"not": {"enum": [0, True]}},
    {"multipleOf": 5}, {"type": "number", "multipleOf": 0.5}, {"type": "integer", "maximum": 9223372036854775807},
    {"format": "date"}, {"format": "date", "maxLength": 9}, {"type": "string", "format": "ipv4", "pattern": "^1"},
    {"type": "integer", "format": "int32"}, {"format": "email"}, {"format": "date-time"},
    {"type": "null", "format": "x"},
    {"enum": [1, "a", None, {"a": 1}, [1]]}, {"enum": ["a", 1], "type": "string"}, {"const": {"a": [1, 2]}},
    {**INTEGER, "$ref": "#/$defs/i", "minimum": 100}, {**INTEGER, "$ref": "#/$defs/a~1b%20c"},
    {**INTEGER, "$ref": "#named"}, {**INTEGER, "$id": "http://e/root", "$ref": "root#/$defs/i"},
    {"$defs": {"x": {"$id": "http://e/x", "type": "object", "properties": {"a": {"$ref": "#/$defs/y"}},
     "$defs": {"y": {"type": "integer"}}}, "y": {"type": "string"}}, "$ref": "http://e/x"},
    {"$ref": "#/$defs/t", "$defs": {"t": {"type": "object", "properties": {"a": {"$ref": "#/$defs/t"}}}}},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {"type": "integer"}, "b": {}}},
    {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": False,
     "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    {"allOf": [{"minimum": 2}, {"maximum": 6}, {"type": "integer"}]}, {"allOf": [{"pattern": "a"}], "maxLength": 2},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"oneOf": [{"$ref": "#/$defs/p"}, {"$ref": "#/$defs/q"}], "$defs": {
        "p": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]},
        "q": {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"]}}},
    {"oneOf": [
        {"type": "object", "properties": {name: {}, "c": {}}, "required": [name], "additionalProperties": False}
        for name in "ab"]},
    {"oneOf": [{"type": "object", "required": ["a"]}, {"type": "object", "properties": {"a": False}}]},
    {"oneOf": [{"type": "number", "maximum": 1}]}, {"not": {}}, {"not": {"type": "string"}},
    {"not": {"required": ["a"]}, "type": "object"}, {"not": {"required": ["a", "b"]}},
    {"items": {"type": "integer"}, "minItems": 1}, {"items": [{"type": "integer"}], "additionalItems": False},
    {"prefixItems": [{"type": "integer"}], "additionalItems": False},
    {"prefixItems": [{"type": "integer"}], "items": False},
    {"items": [{"type": "integer"}], "anyOf": [{"type": "array"}], "additionalItems": False},
    {"properties": {"a": {"not": {"const": 1}}}}, {"if": {"minLength": 2}, "then": {"maxLength": 1}},
    {"not": {"const": "ab"}}, {"not": {"enum": ["a", "ab", None, True]}},
    {"not": {"properties": {"a": {"const": "x"}}}}, {"if": True, "then": {"const": 1}},
    {"not": {"anyOf": [{"type": "object"}, {"allOf": [{"type": "string"}, {"enum": ["a", "b"]}]}]}},
    {"not": {"properties": {"a": {"enum": ["x", None]}, "b": True}, "required": ["a"]}, "type": "object"},
    {"if": {"type": "string"}, "then": {"maxLength": 1}, "else": {"type": "integer"}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    {"if": {"properties": {"a": {"const": "x"}}}, "else": {"required": ["b"]}, "type": "object"},
    {"oneOf": [True, {"type": "string"}]}, {"oneOf": [{"type": ["string", "null"]}, {"enum": ["a", True]}]},
    {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "oneOf": [{"required": [name]} for name in "abc"]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "object", "properties": {n: {}}, "additionalProperties": False} for n in "ab"]},
    {"type": "array", "items": {"enum": [1, "a", True]}, "uniqueItems": True},
    {"type": "array", "items": {"$ref": "#/$defs/i"}, "$defs": {"i": {"const": 1}}, "uniqueItems": True, "minItems": 1},
    {"prefixItems": [{"const": "a"}, {"const": 1}], "items": False, "uniqueItems": True},
    {"type": "array", "items": {"type": ["boolean", "null"]}, "uniqueItems": True},
    {"not": {"pattern": "^[ab]*$"}}, {"if": {"pattern": "^a|b$"}, "then": {"maxLength": 1}},
    {"properties": {"a": {"$recursiveRef": "#"}, "b": {"type": "string"}}, "type": "object"},
    {"prefixItems": [{}, {}, {}], "items": False, "minItems": 1, "maxItems": 2}, {"format": "hostname", "maxLength": 3},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 1, "exclusiveMinimum": True},
    {"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}, {"unevaluatedItems": False, "prefixItems": [True]},
    {"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, {"required": ["a"]},
    {"patternProperties": {"^a": {"type": "integer"}}}, {"properties": {"a": False}},
    {"properties": {"abc": {"type": "integer"}}, "patternProperties": {"^a": {"type": "string"}}},
    {"type": "object", "propertyNames": {"pattern": "^a"}}, {"type": "object", "propertyNames": {"enum": ["a", "b"]}},
    {"propertyNames": {"$ref": "#/$defs/k"}, "$defs": {"k": {"enum": ["a"]}}}, {"propertyNames": False},
    {"propertyNames": False, "maxProperties": 3},
    {"type": "object", "propertyNames": {"const": "a"}}, {"propertyNames": {"type": "string", "format": "guid"}},
    {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": {"type": "integer"}},
    {"type": "object", "propertyNames": {"minLength": 2}}, {"propertyNames": {"minLength": 1, "maxLength": 1}},
    {"properties": {"a": {}, "b": {}}, "type": "object", "minProperties": 2, "additionalProperties": False},
    *({"properties": {"a": {}, "b": {}, "c": {}}, "type": "object", **numbers, "additionalProperties": False}
      for numbers in ({"minProperties": 1}, {"maxProperties": 1}, {"minProperties": 1, "maxProperties": 2})),
    {"minProperties": 1}, {"maxProperties": 1}, {"properties": {"a": {}}, "unevaluatedProperties": False},
    {"allOf": [{"properties": {"a": {}}}, {"required": ["b"]}], "unevaluatedProperties": {"type": "string"}},
    {"$ref": "#/$defs/o", "unevaluatedProperties": False, "$defs": {"o": {"properties": {"b": {"type": "string"}}}}},
    {"allOf": [{"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}], "not": {"required": ["b"]},
     "unevaluatedProperties": False, "type": "object"},
    {"dependentRequired": {"a": ["b"]}}, {"dependencies": {"a": ["b"], "b": {"required": ["a"]}}},
    {"dependentSchemas": {"a": {"properties": {"b": {"type": "string"}}}}}, {"if": {"type": "string"}},
    {"minContains": 2}, {"type": "object", "properties": {"a": {}}, "required": ["a", "b"]},
    {"$comment": 1, "title": 2, "default": {"not": {}}, "examples": 3, "x-any": {"not": 1}, "readOnly": True},
    {"x-guidance": {"lenient": True}, "type": "integer"}, {"contentEncoding": "base64", "deprecated": True},
]  # fmt: skip
OBJECT_A = {"type": "object", "properties": {"a": {}}}
REFUSED: dict[str, list[dict[str, Any]]] = {
    "#/properties/a/not": [{"properties": {"a": {"not": {"const": [1]}}}}],
    "#/if": [
        {"if": {"pattern": "abc"}, "then": {"maxLength": 1}},
        {"if": {"type": "string"}, "then": {"maxLength": 1}, "$schema": "http://json-schema.org/draft-06/schema#"},
    ],
    "#/not": [
        {"type": "number", "not": {"type": "integer"}},
        {"not": {"const": "a"}, "$schema": "http://json-schema.org/draft-04/schema#"}, {"not": {"const": "a\x01"}},
        {"not": {"enum": [f"{number}" * 99 for number in range(9)]}}, {"not": {"format": "date-time"}},
    ],
    "#/uniqueItems": [
        {"type": "array", "items": {"enum": [*range(9)]}, "uniqueItems": True},
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "uniqueItems": True},
        {"items": {"enum": ["a"]}, "uniqueItems": True}, {"uniqueItems": True},
        {"items": [{"type": "boolean"}] * 2, "additionalItems": False, "uniqueItems": True},
    ],
    "#/oneOf": [
        {"type": "string", "oneOf": [{"pattern": f"^.{{99}}{number}:$"} for number in range(40)]},
        {"oneOf": [{"pattern": "^a.b"}, {"pattern": "^b"}]}, {"oneOf": [{"type": "integer"}, {"minimum": 3}]},
        {"oneOf": [{"required": [f"{number}"]} for number in range(9)]},
        {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"o": {"type": "object"}}, "oneOf": [
            {"$ref": "#/definitions/o", "properties": {"a": {"const": value}}, "required": ["a"]} for value in "xy"]},
        {"oneOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]},
        {"oneOf": [
            {"type": "object", "required": ["a"]},
            {"type": "object", "patternProperties": {"a": {}}, "additionalProperties": False}]},
    ],
    "#/$ref": [
        {"$ref": "http://e/x", "x-known": {"$id": "http://e/x", "type": "integer"}}, {"$ref": "https://example.com/x"},
        {"$ref": "file:///etc/passwd"}, {"$ref": "#/$defs/none"},
    ],
    "#/contains": [
        {"contains": {"type": "integer"}, "maxContains": 2}, {"contains": True, "minContains": 21},
        {"contains": {"const": 1}, "maxItems": 6, "minContains": 2, "maxContains": 3},
    ],
    "#/propertyNames": [
        {"propertyNames": {"$ref": "#"}}, {"propertyNames": {"minLength": 2, "pattern": "a"}},
        {"propertyNames": {"minLength": 1.5}},
    ],
    "#/properties/a/allOf: cannot": [
        {"properties": {"a": {"allOf": [{"contains": {"const": value}} for value in "abc"]}}},
    ],
    "#/multipleOf: admits no value": [{"minimum": 0.1, "maximum": 0.2, "multipleOf": 0.3, "type": "number"}],
    "#/patternProperties: ": [{"patternProperties": {"\ud800": True}, "type": "object"}],
    "#/pattern": [
        {"pattern": f"^{'(?=a)' * 17}"}, {"pattern": "[\ud800]"}, {"pattern": r"(a)\1"}, {"pattern": r"^a\b"},
    ],
    "#/minProperties: above 1 is not": [{**OBJECT_A, "minProperties": 2}],
    "#/minProperties": [
        {"minProperties": 2},
        {"properties": {name: {} for name in "abcdefghij"}, "minProperties": 5, "maxProperties": 5,
         "additionalProperties": False},
    ],
    "#/unevaluatedProperties": [
        {"anyOf": [{"properties": {"a": {}}}], "oneOf": [{}], "unevaluatedProperties": False},
        {"anyOf": [{"properties": {name: {}}} for name in "abcde"], "unevaluatedProperties": False},
        {"allOf": [{"additionalProperties": {}}], "unevaluatedProperties": False},
        {"allOf": [{"unevaluatedProperties": {}}], "unevaluatedProperties": False},
    ],
    "#/properties/a~1b/pattern": [{"properties": {"a/b": {"pattern": "(?=x)"}}}],
    "#": [{"properties": {"a": {"type": "string", "pattern": r"^a\x00$"}}, "required": ["a"], "type": "object"}],
    "#/patternProperties": [{"patternProperties": {"^a": {"type": "string"}, "^ab": {}}}],
    "#/format": [{"format": "unknown"}],
    "#/items/format": [{"items": {"format": "phone"}}],
    "#/$dynamicRef": [
        {"$dynamicRef": "#x"},
        {"$dynamicRef": "#x", "$dynamicAnchor": "x", "$defs": {"e": {"$id": "http://e/e", "$dynamicAnchor": "x"}}},
    ],
    "#/items/$recursiveRef": [{"items": {"$recursiveRef": "#"}, "$defs": {"e": {"$id": "http://e/e"}}}],
    "#/const": [{"const": 9007199254740993}, {"const": 123456789.12345679}],
    "#/enum": [{"enum": ["a", "\x00"]}, {"enum": ["a", [8693937465906300.0]]}],
    "#/type": [{"type": "any"}],
    "#/properties/b/required": [{"properties": {"a": {"type": "string", "required": True}, "b": {"required": True}}}],
    "#/minLength": [{"minLength": "3"}],
    "#/multipleOf": [{"multipleOf": 0}, {"multipleOf": 1_000_000}, {"type": "number", "multipleOf": 0.12345}],
    "#/$defs/t": [
        {"$defs": {"t": {"properties": {"a": {"$ref": "#/$defs/t", "minProperties": 1}}}}, "$ref": "#/$defs/t"},
    ],
    "#/$schema: draft 03": [{"$schema": "http://json-schema.org/draft-03/schema#", "type": "string"}],
    "#/$schema: must be": [{"$schema": 5}],
    "#/propertyNames: must be": [{"propertyNames": 1}],
    "#/dependentRequired: must": [{"dependentRequired": {"a": ["b", 1]}}],
    "#/dependencies: ": [{"dependencies": {"a": {"maxProperties": 2}}, "properties": {"a": {}, "b": {}}}],
    "#/minLength: admits no value with #/maxLength": [{"type": "string", "minLength": 5, "maxLength": 3}],
    "#/const: admits no value with #/type": [{"const": "a", "type": "integer"}],
    "#/allOf: admits no value": [{"allOf": [{"const": 1}, {"const": True}]}, {"allOf": [False]}],
    "#/$ref: admits no value": [{"$ref": "#/$defs/a", "type": "string", "$defs": {"a": {"type": "integer"}}}],
    "#/items/maxL": [{"items": {"format": "date", "maxLength": 9, "type": "string"}, "minItems": 1, "type": "array"}],
    "#/required: admits no value": [{"properties": {"a": {"not": {}}}, "required": ["a"], "type": "object"}],
    "#/not: admits no value": [{"not": {}}],
    "#/oneOf: admits no value": [{"oneOf": [{"const": "a"}, {"const": "a"}]}],
    "#/minProperties: admits no value": [
        {"properties": {"a": {}}, "type": "object", "minProperties": 2, "additionalProperties": False},
    ],
    "#/anyOf: admits no value": [{"anyOf": [False]}],
}  # fmt: skip


def validator_of(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(_newest(schema), format_checker=CHECKER)


def _newest(schema: Any) -> Any:
    """Rewrite a schema for draft 2020-12: lists in `items`, booleans in limits and `dependencies` are older."""
    if isinstance(schema, list):
        return [_newest(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {name: one if name in ("enum", "const") else _newest(one) for name, one in schema.items()}
    if isinstance(schema.get("items"), list):
        first = schema.pop("items")
        if "prefixItems" not in schema:
            schema["prefixItems"] = first
            schema["items"] = schema.pop("additionalItems", True)
    schema.pop("additionalItems", None)
    for name, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and name in schema:
            schema[exclusive] = schema.pop(name)
    if isinstance(schema.get("dependencies"), dict):
        parts = schema.pop("dependencies").items()
        kinds = {True: "dependentRequired", False: "dependentSchemas"}
        more = [{kinds[isinstance(one, list)]: {name: one}} for name, one in parts]
        schema["allOf"] = [*schema.get("allOf", []), *more]
    return schema


def invalid_outputs(schema: dict[str, Any], seed: int, outputs: int = 8) -> list[str]:
    """Return outputs that the grammar of a strict schema admits although they are invalid."""
    grammar, validator, wrong = compiled(TOKENIZER, "json_schema", schema), validator_of(schema), []
    for value in VALUES:
        text = json.dumps(value, ensure_ascii=False)
        if admits(grammar, text) and not validator.is_valid(value):
            wrong.append(text)
    draw = random.Random(seed)
    for _ in range(outputs):
        output = random_output(grammar, draw)
        if output is not None and not validator.is_valid(json.loads(output)):
            wrong.append(output.decode())
    return wrong


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda schema: json.dumps(schema)[:60])
def test_strict_schema_admits_only_valid_outputs(schema):
    if validator_of(schema).is_valid(None) or any(map(validator_of(schema).is_valid, VALUES)):
        assert invalid_outputs(schema, 1) == []
    else:
        with pytest.raises(ValueError, match="admits no"):
            compiled(TOKENIZER, "json_schema", schema)


CARD = {"type": "object", "properties": {"card": {"type": "integer"}}}
TAGGED = [{"properties": {"tag": {"const": tag}, tag: {"type": "integer"}}} for tag in "xy"]
OPEN = [{"properties": {name: {"type": "integer"}}, "required": [name]} for name in "abcde"]
ADMITTED: list[tuple[dict[str, Any], Any]] = [
    # Names in dependencies and constants are not excluded by closing the object.
    ({**CARD, "dependentRequired": {"card": ["owner"]}, "required": ["card"]}, {"card": 1, "owner": None}),
    ({**CARD, "dependencies": {"owner": ["card"]}, "maxProperties": 1}, {"card": 1}),  # enforceable since closed
    ({**CARD, "dependencies": {"owner": ["card"]}}, {"card": 1, "owner": None}),
    ({**CARD, "dependentSchemas": {"card": {"properties": {"owner": {"type": "null"}}}}}, {"card": 1, "owner": None}),
    ({**CARD, "enum": [{"card": 1}, {"owner": 2}]}, {"owner": 2}),
    # Keywords about objects admit all other values.
    ({"minProperties": 2, "additionalProperties": False}, 5),
    ({"maxProperties": 1, "minProperties": 1, "additionalProperties": False, "type": ["object", "null"]}, None),
    # Properties are in the order of the schema, whatever precedes them.
    ({"type": "object", "allOf": [{"$ref": "#/$defs/z"}], "properties": {"a": {}}, "$defs": {"z": {
        "properties": {"z": {}}}}}, {"z": 1, "a": 2}),
    ({"$defs": {"z": {"properties": {"z": {}}}}, "properties": {"a": {}}, "$ref": "#/$defs/z"}, {"a": 1, "z": 2}),
    # Properties that several branches evaluate.
    *(({"type": "object", "anyOf": OPEN[:3], "unevaluatedProperties": False}, dict.fromkeys(names, 1))
      for names in ("a", "ab", "bc", "abc")),
    # Branches that differ because of a keyword next to oneOf.
    ({"type": "object", "required": ["tag"], "oneOf": TAGGED}, {"tag": "y", "y": 1}),
    # 1 and true differ, and a number of 0 is stated.
    ({"type": "array", "items": {"enum": [1, "a", True]}, "uniqueItems": True}, [1, True]),
    ({"contains": {"const": 1}, "minContains": 0}, [2]),
    # A definition is closed where it stands alone, and open next to further properties.
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/c"}, "b": {"$ref": "#/$defs/c", "properties": {"d": {}}}},
      "$defs": {"c": CARD}}, {"a": {"card": 1}, "b": {"card": 1, "d": 2}}),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "value"), ADMITTED)
def test_strict_schema_admits_a_valid_output(schema, value):
    assert validator_of(schema).is_valid(value)
    assert admits(compiled(TOKENIZER, "json_schema", schema), json.dumps(value))
    assert invalid_outputs(schema, 1) == []


def test_schema_that_is_not_strict_admits_a_valid_integer():
    for schema in ENFORCED:
        if validator_of(schema).is_valid(1):
            grammar = compiled(TOKENIZER, "json_schema", schema, strict=False)
            assert admits(grammar, "1"), schema


def test_valid_schema_is_compiled_once(monkeypatch):
    texts, matcher = [], compiling._matcher
    monkeypatch.setattr(compiling, "_matcher", lambda tokenizer, text: texts.append(text) or matcher(tokenizer, text))
    assert admits(compiled(TOKENIZER, "json_schema", {"type": "array", "items": {"type": "integer"}}), "[1, 2]")
    assert len(texts) == 1


@pytest.mark.parametrize(("place", "schema"), [(place, schema) for place in REFUSED for schema in REFUSED[place]])
def test_unenforceable_keywords_are_refused_by_their_path(place, schema):
    with pytest.raises(ValueError, match=r".") as refused:
        compiled(TOKENIZER, "json_schema", schema)
    assert place in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}},
        {"type": "object", "minProperties": 1, "additionalProperties": {"$ref": "#"}},
        {"anyOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    ],
    ids=["object", "array", "additional", "minimum", "alternative", "reference"],
)
def test_endlessly_recursive_values_are_refused(schema):
    with pytest.raises(ValueError, match="admits no"):
        compiled(TOKENIZER, "json_schema", schema)


NAMES = {"type": "object", "patternProperties": {"^[xy]$": {"type": "integer"}}, "additionalProperties": False}
FINITE: list[dict[str, Any]] = [
    *({**NAMES, "properties": {"x": {}, "y": {}}, "required": ["x", "y"], "patternProperties": {name: {"type": "null"}}}
      for name in ["^x$", "^(x|y)$", r"^\x01$", "^[xyz]$"]),
    {**NAMES, "allOf": [{"required": ["x"]}, {"required": ["y"]}]},
    {**NAMES, "dependentRequired": {"x": ["y"], "y": ["x"]}},
    {**NAMES, "required": ["y"], "not": {"required": ["x"]}}, {**NAMES, "required": ["x", "z"], "minProperties": 2},
    {"type": "object", "propertyNames": {"pattern": "^[xy]$"}, "$ref": "#/$defs/base", "$defs": {
        "base": {"properties": {"x": {"type": "integer"}, "y": {"type": "boolean"}}}}},
    {"type": "object", "propertyNames": {"pattern": "^x$"}, "allOf": [{"properties": {"x": {"const": 1}}}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", FINITE, ids=lambda schema: json.dumps(schema)[:60])
def test_patterns_that_match_only_stated_names_list_them(schema):
    """After the last name, llguidance would admit a comma, but no further property."""
    objects = [
        dict(zip(names, values, strict=True))
        for names in ("", "x", "y", "xy")
        for values in product(*[(1, True, None)] * len(names))
    ]
    validator = validator_of(schema)
    if not any(map(validator.is_valid, objects)):
        with pytest.raises(ValueError, match="admits no value"):
            compiled(TOKENIZER, "json_schema", schema)
        return
    grammar = compiled(TOKENIZER, "json_schema", schema)
    assert [one for one in objects if admits(grammar, json.dumps(one))] == [*filter(validator.is_valid, objects)]
    outputs = [random_output(grammar, random.Random(seed)) for seed in range(20)]
    assert all(validator.is_valid(json.loads(output)) for output in outputs if output is not None)


NEVER = [{"$ref": "#/$defs/r"}, {"$ref": "#/$defs/o"}, {"allOf": [{"$ref": "#/$defs/r"}, {"type": ["object", "null"]}]}]


@pytest.mark.parametrize("never", NEVER, ids=["reference", "object", "conjunction"])
@pytest.mark.parametrize(
    ("place", "only"),
    [
        (lambda never: {"anyOf": [closed({"a": never}, ["a"]), {"type": "null"}]}, "null"),
        (lambda never: closed({"a": closed({"b": never}, ["b"])}), "{}"),
        (lambda never: {"type": "array", "items": {"type": "array", "minItems": 1, "items": never}}, "[]"),
        (lambda never: {"type": "object", "additionalProperties": never}, "{}"),
        (lambda never: {"type": "object", "patternProperties": {"^a": never}, "additionalProperties": False}, "{}"),
    ],
    ids=["alternative", "property", "item", "additional", "pattern"],
)
def test_endlessly_recursive_values_are_never_begun(place, only, never):
    """Optional values of this kind are omitted."""
    endless = {"r": {"$ref": "#/$defs/r"}, "o": closed({"x": {"$ref": "#/$defs/o"}}, ["x"])}
    grammar = compiled(TOKENIZER, "json_schema", {**place(never), "$defs": endless})
    assert {random_output(grammar, random.Random(seed)) for seed in range(8)} == {only.encode()}


def test_hostnames_have_no_punycode_labels():
    """Text after `xn--` must decode to an allowed name, which only tables can decide."""
    grammar = compiled(TOKENIZER, "json_schema", {"type": "string", "format": "hostname"})
    names = ["a", "a-b.c3", "a--b", "a1b--c", f"{'a' * 63}.b"]
    others = ["", "-a", "a-", "a..b", "xn--x", "b.XN--aa", "ab--c", "a_b", "a" * 64, "a." * 127 + "a"]
    assert [name for name in (*names, *others) if admits(grammar, json.dumps(name))] == names


@pytest.mark.parametrize("step", [2.5, 5.0, 0.5, 3])
def test_large_multiples_can_be_validated(step):
    """A validator that divides by a float fails for integers beyond float64."""
    schema = {"type": "integer", "multipleOf": step}
    grammar, validator = compiled(TOKENIZER, "json_schema", schema), validator_of(schema)
    admitted = [value for value in (0, 30, 30 * 10**10, -(30 * 10**10), 30 * 10**400) if admits(grammar, str(value))]
    assert len(admitted) >= 4
    assert all(map(validator.is_valid, admitted))


def closed(properties: dict[str, Any], required: list[str] | None = None) -> dict[str, Any]:
    more = {} if required is None else {"required": required}
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def test_schema_that_is_not_strict_is_enforced_as_far_as_possible():
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {"oneOf": [{"type": "integer"}, {"minimum": 3, "pattern": "(?=x)"}]},
        "maxItems": 2,
    }
    grammar = compiled(TOKENIZER, "json_schema", schema, strict=False)
    places = {lost.place for lost in grammar.unenforced}
    assert places == {"#/uniqueItems", "#/items/oneOf", "#/items/oneOf/1/pattern"}
    many = {"type": "array", "uniqueItems": True, "items": {"enum": [*range(30)]}, "minItems": 3, "maxItems": 3}
    lost = compiled(TOKENIZER, "json_schema", many, strict=False).unenforced
    assert [each.place for each in lost] == ["#/uniqueItems"]
    assert admits(grammar, "[1, 1]")
    assert not admits(grammar, "[1, 1, 1]")


@pytest.mark.parametrize("referenced", [False, True])
def test_keyword_refused_by_llguidance_is_dropped_unless_strict(referenced):
    """Also at the root, next to definitions."""
    null = {"type": "null"}
    schema = {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/null"} if referenced else null},
        "patternProperties": {"^a": {"type": "string"}, "^ab": {}},
        "$defs": {"null": null},
    }
    grammar = compiled(TOKENIZER, "json_schema", schema, strict=False)
    assert [lost.place for lost in grammar.unenforced] == ["#/patternProperties"]
    assert admits(grammar, '{"x": null, "abc": 1}')
    assert not admits(grammar, '{"x": 1}')


def test_only_the_keyword_at_fault_is_dropped():
    """llguidance cannot tell whether a long host name exists; its error shows all limits of lengths."""
    host = {
        "type": "string",
        "minLength": 1,
        "maxLength": 253,
        "pattern": r"^(?:[a-z](?:[a-z-]{0,61}[a-z])?\.)+[a-z]{2,}$",
    }
    grammar = compiled(TOKENIZER, "json_schema", {"type": "array", "items": host}, strict=False)
    assert [lost.place for lost in grammar.unenforced] == ["#/items/maxLength"]
    assert not admits(grammar, '["a"]')
    with pytest.raises(UnenforceableError) as caught:
        compiled(TOKENIZER, "json_schema", {"type": "array", "items": host})
    assert str(caught.value).endswith("set strict to false")
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("place", "schema"),
    [
        *(
            ("patternProperties", {"patternProperties": {one: {"type": "integer"} for one in patterns}, **rest})
            for patterns in (["^a", "b$"], [r"^(.)\1"], [r"^a\b"], [r"^(.)\1", "^c"])
            for rest in ({"additionalProperties": False}, {"additionalProperties": {"type": "null"}})
        ),
        (
            "propertyNames",
            {"propertyNames": {"pattern": "^a"}, "allOf": [{"propertyNames": {"minLength": 1}}], "minProperties": 1},
        ),
    ],
)
def test_properties_of_dropped_patterns_are_not_additional(place, schema):
    """Without the patterns, `additionalProperties` would exclude the names that they match."""
    grammar = compiled(TOKENIZER, "json_schema", {"type": "object", **schema}, strict=False)
    assert {lost.keyword for lost in grammar.unenforced} == {place, *schema} & {place, "additionalProperties"}
    assert [one for one in ({"aa": 1}, {"a": 1}) if validator_of(schema).is_valid(one)]
    for one in ({"aa": 1}, {"a": 1}, {"ab": 1}):
        assert admits(grammar, json.dumps(one)) or not validator_of(schema).is_valid(one)


@pytest.mark.parametrize("schema", [{"format": "phone"}, {"type": "string", "pattern": "^a", "format": "/^x/"}])
def test_unknown_formats_are_annotations_unless_strict(schema):
    assert admits(compiled(TOKENIZER, "json_schema", schema, strict=False), '"a"')
    with pytest.raises(UnenforceableError):
        compiled(TOKENIZER, "json_schema", schema)


NAMES = st.sampled_from(["a", "b", "c", "abc"])
LEAVES = st.one_of(
    st.sampled_from(ENFORCED[:30] + [*chain.from_iterable(REFUSED.values())][:15]).map(
        lambda schema: {name: one for name, one in schema.items() if name not in ("$defs", "$ref", "$id", "$schema")}
    ),
    st.sampled_from([{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}, {"$ref": "#named"}]),
    st.booleans(),
)
KEYWORDS = {
    "properties": lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3),
    "patternProperties": lambda inner: st.dictionaries(st.sampled_from(["^a", "b$", "[0-9]"]), inner, max_size=2),
    **dict.fromkeys(("allOf", "anyOf", "oneOf"), lambda inner: st.lists(inner, min_size=1, max_size=3)),
    **dict.fromkeys(("prefixItems",), lambda inner: st.lists(inner, min_size=1, max_size=2)),
    **dict.fromkeys(
        ("items", "additionalProperties", "not", "unevaluatedProperties", "additionalItems"), lambda inner: inner
    ),
    "dependentSchemas": lambda inner: st.dictionaries(NAMES, inner, max_size=1),
    "dependentRequired": lambda inner: st.just({"a": ["b"]}),
    "required": lambda inner: st.lists(NAMES, min_size=1, max_size=2, unique=True),
    "type": lambda inner: st.sampled_from(["object", "array", "string", "integer", ["object", "null"]]),
    "contains": lambda inner: inner,
    **dict.fromkeys(("minContains", "maxContains", "maxItems"), lambda inner: st.integers(0, 2)),
    "minimum": lambda inner: st.sampled_from([0, 2, 100]),
    "maxLength": lambda inner: st.integers(0, 3),
}


def combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    parts = st.lists(st.sampled_from(sorted(KEYWORDS)), min_size=1, max_size=3, unique=True)
    return parts.flatmap(lambda names: st.fixed_dictionaries({name: KEYWORDS[name](inner) for name in names}))


SCHEMAS = st.recursive(LEAVES, combined, max_leaves=8).filter(lambda schema: isinstance(schema, dict))


@fuzz(150)
@given(schema=SCHEMAS, x=LEAVES, y=SCHEMAS, seed=st.integers(0, 999))
def test_combined_keywords_admit_only_valid_outputs(schema, x, y, seed):
    schema = {**schema, "$defs": {"x": x, "y": y, "z": {"$anchor": "named", "type": "integer"}}}
    refusal, wrong = "", list[str]()
    try:
        wrong = invalid_outputs(schema, seed)
    except RecursionError:
        pass  # the validator follows a reference to itself
    except ValueError as error:
        refusal = str(error)
    assert wrong == []
    if refusal:
        resource = DRAFT202012.create_resource(schema)
        Registry().resolver_with_root(resource).lookup(refusal.partition(": ")[0])


@pytest.mark.parametrize("keyword", [*sorted(KEYWORDS), "$ref", "const", "enum", "pattern", "format", "dependencies"])
def test_keyword_values_of_wrong_types_cause_no_other_errors(keyword):
    """The schema is accepted or refused with a ValueError, alone and next to keywords that read the value."""
    for value in (None, True, 0, 1.5, "x", [], ["a"], [[]], {}, {"a": 1}, {"a": [1]}, [True, "x"]):
        inner = {keyword: value, "required": ["a"]}
        beside = (
            {"type": "object", "properties": {"a": inner}, "anyOf": [value, inner]},
            {"oneOf": [{keyword: value}, {"type": "string", keyword: value}, {"allOf": [inner]}]},
            {"type": "object", "propertyNames": {keyword: value}},
            {"not": {keyword: value}, "dependentSchemas": {"a": inner}},
        )
        for schema in (inner, *beside):
            for strict in (True, False):
                with contextlib.suppress(ValueError):
                    compiled(TOKENIZER, "json_schema", schema, strict)


def test_schemas_have_limits():
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(2 * MAX_DEPTH):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="nested"):
        compiled(TOKENIZER, "json_schema", deep)
    with pytest.raises(ValueError, match="more than 50,000 parts"):
        enforceable({"anyOf": [{"type": "null"}] * 60_000}, closed=False)
    for schema in (3, [], "x"):
        with pytest.raises(ValueError, match="must be an object"):
            compiled(TOKENIZER, "json_schema", json.dumps(schema))
