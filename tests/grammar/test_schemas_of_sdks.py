"""Strict schemas as client libraries write them: outputs are valid by `jsonschema`, or the schema is refused.

Sources: pydantic, openai-python's `to_strict_json_schema`, zod-to-json-schema, zod 4, OpenAPI generators and people.
"""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import random
import uuid
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jsonschema
import pytest
from openai.lib._pydantic import to_strict_json_schema
from pydantic import (
    UUID1,
    UUID3,
    UUID4,
    UUID5,
    UUID6,
    UUID7,
    UUID8,
    Base64Bytes,
    Base64UrlBytes,
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyAddress,
    SecretStr,
    StringConstraints,
    TypeAdapter,
)
from support.byte_grammars import admits, byte_tokenizer, random_output

from token_recycling.grammar.compile import compiled

TOKENIZER = byte_tokenizer()


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    bark: Annotated[str, StringConstraints(max_length=2)] | None = None


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    tags: Annotated[list[Literal["a", 1, True, None]], Field(max_length=2)] = []


class Expression(BaseModel):
    op: Literal["+", "-"]
    left: Expression | int
    right: Expression | None = None


class Color(enum.Enum):
    RED = "red"
    TWO = 2
    NONE = None


class Point(NamedTuple):
    x: int
    y: bool = False


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    key: str = Field("x", alias='naïve "key"', max_length=3, examples=["y"], title="Key")
    color: Color
    point: Point
    pair: tuple[Literal["a"], Annotated[int, Field(multiple_of=5, gt=-10, lt=20)]]


class Places(BaseModel):
    at: datetime.date
    id: uuid.UUID
    host: ipaddress.IPv4Address
    zip: Annotated[str, StringConstraints(pattern=r"^\d{5}(-\d{4})?$")]


class Maps(BaseModel):
    counts: dict[Literal["x", "y"], int]
    days: Annotated[dict[datetime.date, bool], Field(min_length=1, max_length=1)]
    files: Annotated[dict[uuid.UUID, None], Field(max_length=1)]
    one: dict[Literal["x"], int]
    more: Annotated[dict[str, list[bool | None]], Field(max_length=1)] = {}


MODELS: list[type[BaseModel]] = [Owner, Expression, Closed, Places, Maps]
A, B, TEXT, INTEGER = {"const": "a"}, {"const": "b"}, {"type": "string", "maxLength": 2}, {"type": "integer"}
OBJECT = {"type": "object"}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    needed = [*properties] if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False, **more}


LIST = {"oneOf": [{"type": "null"}, closed({"head": INTEGER, "tail": {"$ref": "#/$defs/list"}})]}
ANY = [{"type": name} for name in ("null", "boolean", "number")]
ANY += [{"type": "array", "items": {"$ref": "#/$defs/any"}, "maxItems": 2}]
ANY += [{"type": "object", "additionalProperties": {"$ref": "#/$defs/any"}, "maxProperties": 1}]
WRITTEN: dict[str, Any] = {
    "reference": {"$ref": "#/definitions/s", "definitions": {"s": closed({"a": INTEGER})}, "$schema": DRAFT_7},
    "recursive": {"$schema": DRAFT_7, **closed({"name": TEXT, "more": {"type": "array", "items": {"$ref": "#"}}})},
    "reference by path": closed({"a": closed({"x": TEXT}), "b": {"$ref": "#/properties/a"}}),
    "literals": {"anyOf": [{"type": "string", **A}, {"type": "number", "const": 1}, {"const": True}, {"type": "null"}]},
    "mixed enum": {"type": ["string", "number", "null"], "enum": ["a", 1, None]},
    "enum of another type": {"type": "string", "enum": ["a", 1, None]},
    "union": {"anyOf": [closed({"t": A, "n": INTEGER}), closed({"t": B, "s": TEXT})]},
    "discriminated": {"oneOf": [closed({"t": A, "n": INTEGER}), closed({"t": B, "s": TEXT})]},
    "discriminator mapping": {
        "oneOf": [{"$ref": "#/components/A"}, {"$ref": "#/components/B"}],
        "discriminator": {"propertyName": "t", "mapping": {"a": "#/components/A"}},
        "components": {"A": closed({"t": {"enum": ["a"]}}), "B": closed({"t": {"enum": ["b"]}})},
    },
    "record": {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "additionalProperties": INTEGER},
    "record of an enum": {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER, "required": ["a"]},
    "intersection": {"allOf": [{"properties": {"a": TEXT}, "required": ["a"]}, {"required": ["b"]}], "type": "object"},
    "tuple": {"type": "array", "minItems": 2, "maxItems": 2, "items": [TEXT, INTEGER], "$schema": DRAFT_7},
    "tuple with a rest": {"items": [TEXT], "additionalItems": INTEGER, "type": "array", "$schema": DRAFT_7},
    "tuple of 2020": {"type": "array", "prefixItems": [TEXT, INTEGER], "items": {"type": "boolean"}, "minItems": 1},
    "safe integer": {"type": "integer", "minimum": 1 - 2**53, "maximum": 2**53 - 1},
    "above zero": {"type": "number", "exclusiveMinimum": 0},
    "template": {"type": "string", "pattern": "^\\$\\d+\\.\\d{2}$"},
    "base64": {"type": "string", "contentEncoding": "base64", "pattern": "^(?:[0-9A-Z+/]{4})*(?:[0-9A-Z+/]{2}==)?$"},
    "nullable": closed({"a": {**TEXT, "nullable": True}, "b": {"enum": ["x", None], "nullable": True}}),
    "OpenAPI": closed({"id": {**INTEGER, "format": "int64", "readOnly": True}, "b": {**INTEGER, "format": "uint8"}}),
    "ordered": {"type": "object", "properties": {"a": TEXT, "b": A}, "propertyOrdering": ["b", "a"], "required": ["a"]},
    "dependent": closed({"card": INTEGER, "to": TEXT}, [], dependentRequired={"card": ["to"]}),
    "not both": closed({"a": INTEGER, "b": INTEGER}, [], **{"not": {"required": ["a", "b"]}}),
    "const object": {"const": {"type": "x", "list": [1, 2.5, None, {"ключ": "é"}]}},
    "patterns": {"patternProperties": {"^s": TEXT, "^i": INTEGER}, "additionalProperties": False, "maxProperties": 2},
    "next to a reference": {"$defs": {"n": {**INTEGER, "minimum": 0}}, "items": {"$ref": "#/$defs/n", "maximum": 3}},
    "wrapped": closed(
        {"e": {"allOf": [{"$ref": "#/$defs/E"}], "default": "a"}}, **{"$defs": {"E": {"enum": ["a", 1]}}}
    ),
    "any JSON": {"$defs": {"any": {"anyOf": ANY}}, "$ref": "#/$defs/any"},
    "linked list": closed({"l": {"$ref": "#/$defs/list"}}, **{"$defs": {"list": LIST}}),
    "types": {"type": ["object", "array", "null"], "properties": {"a": INTEGER}, "items": A, "maxItems": 2},
    "schemas that are booleans": closed({"a": True, "b": False}, ["a"]),
    "format or empty": {"type": "string", "anyOf": [{"format": "date"}, {"const": ""}]},
    "a file": TypeAdapter(bytes).json_schema(),
    "a set of an enum": TypeAdapter(Annotated[set[Literal["a", "b", "c"]], Field(max_length=2)]).json_schema(),
    "not a constant": {"type": "string", "not": A, "maxLength": 2},
    "a condition": closed(
        {"country": {"enum": ["US", "CA"]}, "code": {"type": "string"}},
        **{
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"properties": {"code": {"pattern": "^[0-9]{5}$"}}},
        },
        **{"else": {"properties": {"code": {"pattern": "^[A-Z][0-9][A-Z]$"}}}},
    ),
    "a negated condition": closed(
        {"tag": {"enum": ["a", "b"]}, "n": INTEGER},
        ["tag"],
        **{"if": {"not": {"properties": {"tag": A}}}, "then": {"required": ["n"]}},
        **{"else": {"not": {"not": {"properties": {"n": False}}}}},
    ),
    "conditions by a tag": closed(
        {"tag": {"enum": ["a", "b"]}, "n": INTEGER, "s": TEXT},
        ["tag"],
        allOf=[
            {"if": {"properties": {"tag": tag}, "required": ["tag"]}, "then": {"required": [name]}}
            for tag, name in ((A, "n"), (B, "s"))
        ],
    ),
    "one of two": closed({"a": INTEGER, "b": TEXT}, [], oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "at least one": closed({"a": INTEGER, "b": TEXT, "c": A}, [], minProperties=1),
    "non-empty names": {
        "type": "object",
        "propertyNames": {"type": "string", "minLength": 1},
        "maxProperties": 2,
    },
    "an e-mail of zod": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        "maxLength": 12,
    },
    "a beginning of zod": {"type": "string", "format": "starts_with", "pattern": "^ab.*", "maxLength": 4},
    "a password": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)(?!.*\s).{4,9}$"},
    "a tag among few items": {"type": "array", "items": {"enum": ["a", "b"]}, "contains": A, "maxItems": 3},
    "an intersection of zod": {
        "allOf": [
            {"type": "object", "properties": {"b": TEXT}, "required": ["b"]},
            {"type": "object", "properties": {"a": INTEGER}},
        ],
        "unevaluatedProperties": False,
    },
    "a union with a base": {
        "properties": {"b": TEXT},
        "oneOf": [{"$ref": "#/$defs/a"}, {"properties": {"c": INTEGER}, "required": ["c"]}],
        "unevaluatedProperties": False,
        "$defs": {"a": {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}},
        "type": "object",
    },
    "a rating": {"type": "number", "multipleOf": 0.1, "minimum": 0, "maximum": 5},
    "a float of C": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38},
    "a tag among any number of items": {"type": "array", "items": {"enum": ["a", "b"]}, "contains": A},
    "a tree": {
        "$dynamicAnchor": "node",
        "type": "object",
        "properties": {"v": INTEGER, "kids": {"type": "array", "items": {"$dynamicRef": "#node"}}},
        "required": ["v"],
        "additionalProperties": False,
    },
    "an address": {"oneOf": [{**TEXT, "format": "ipv4"}, {**TEXT, "format": "ipv6"}]},
    "a name with exceptions": {**TEXT, "maxLength": 8, "not": {"pattern": "^(admin|root)$"}},
    "a number except 0": {"type": "number", "not": {"const": 0}},
    "many titles": {"oneOf": [{"const": str(number), "title": f"Number {number}"} for number in range(120)]},
    "many events": {"oneOf": [closed({"t": {"const": str(number)}, "n": INTEGER}) for number in range(120)]},
    "objects without a tag": {
        "type": "object",
        "oneOf": [{"properties": {"a": INTEGER}, "required": ["a"]}, {"$ref": "#/$defs/b"}],
        "$defs": {"b": {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}},
    },
    "names without type": {
        "properties": {"a": INTEGER, "b": TEXT},
        "oneOf": [{"$ref": "#/$defs/a"}, {"required": ["b"]}],
        "$defs": {"a": {"required": ["a"]}},
    },
    "a choice next to properties": {
        "type": "object",
        "properties": {"a": INTEGER},
        "required": ["a"],
        "oneOf": [
            {"properties": {"b": INTEGER}, "required": ["b"]},
            {"properties": {"c": {"type": "array", "items": INTEGER}}, "required": ["c"]},
        ],
    },
    "one without the others": closed(
        dict.fromkeys("abc", INTEGER),
        [],
        oneOf=[
            {"required": ["a"], "not": {"anyOf": [{"required": ["b"]}, {"required": ["c"]}]}},
            {"required": ["b"], "not": {"required": ["a"]}},
        ],
    ),
    "at least one property": {"properties": {"a": A}, "additionalProperties": INTEGER, "minProperties": 1, **OBJECT},
    "separate ranges": {"anyOf": [{**INTEGER, "minimum": 10}, {"type": "number", "maximum": 0}]},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a set": (TypeAdapter(set[int]).json_schema(), "#/uniqueItems"),
    "a duration of zod": ({"type": "string", "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?)$"}, "#/pattern"),
    "a condition": ({"if": {"properties": {"a": INTEGER}}, "then": {"required": ["b"]}, "type": "object"}, "#/if"),
    "an item": ({"type": "array", "contains": A, "maxContains": 1}, "#/contains"),
    "Google's types": ({"type": "STRING"}, "#/type"),
    "a date or a time": ({"oneOf": [{"format": "date"}, {"format": "date-time"}]}, "#/oneOf"),
}
SCHEMAS = {
    **WRITTEN,
    **{model.__name__: model.model_json_schema() for model in MODELS},
    **{f"{model.__name__} by openai": to_strict_json_schema(model) for model in MODELS},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_outputs_are_valid_by_jsonschema(name):
    schema = SCHEMAS[name]
    kind = jsonschema.Draft7Validator if schema.get("$schema") == DRAFT_7 else jsonschema.Draft202012Validator
    validator, draw = kind(schema, format_checker=kind.FORMAT_CHECKER), random.Random(name)
    grammar = compiled(TOKENIZER, "json_schema", schema)
    outputs = [output for _ in range(20) if (output := random_output(grammar, draw, 400)) is not None]
    assert outputs
    assert [output for output in outputs if not validator.is_valid(json.loads(output))] == []


@pytest.mark.parametrize("name", REFUSED)
def test_unenforceable_keywords_are_named(name):
    schema, place = REFUSED[name]
    with pytest.raises(ValueError, match=place):
        compiled(TOKENIZER, "json_schema", schema)


NEAR_64 = 2**63 - 1024
"""The largest magnitude at which llguidance distinguishes 64-bit numbers."""
BOUNDS = {
    **{f"int{bits}": ({"format": f"int{bits}"}, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": ({"format": f"uint{bits}"}, 0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    "64 bits of Rust and Go": ({"minimum": -(2**63), "maximum": 2**63 - 1}, -(2**63), 2**63 - 1),
    "unsigned 64 bits": ({"minimum": 0, "maximum": 2**64 - 1}, 0, 2**64 - 1),
    "a float next to 64": ({"minimum": -(2.0**63) + 1024, "maximum": 2.0**63 - 1024}, -NEAR_64, NEAR_64),
    "an integer next to 64": ({"minimum": 2 - 2**63, "maximum": 2**63 - 2}, -NEAR_64, NEAR_64),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_integers_stay_within_their_bounds(name):
    keywords, least, most = BOUNDS[name]
    grammar = compiled(TOKENIZER, "json_schema", {"type": "integer", **keywords})
    nearly = [min(most, NEAR_64), max(least, -NEAR_64), 0]
    beyond = [2**63 - 1, 1 - 2**63] if most == NEAR_64 else [most + 1, least - 1]
    assert [admits(grammar, str(number)) for number in nearly] == [True] * 3
    assert [admits(grammar, str(number)) for number in beyond] == [False] * 2


ADMITTED = {
    "relative-json-pointer": (["0", "1/a~0", "2#"], ["", "/a", "01", "1#/a"]),
    "uri-reference": (["", "/a/b?c=d#e", "a%20b", "//x:1/y", "http://a.b/c", "?q"], ["a b", "%2", "é", "1:2", "a#b#c"]),
    "iri": (["http://a.b/c"], ["a b"]),
    "url": (["http://a.b/c"], ["a b"]),
    "guid": (["550E8400-e29b-41d4-a716-446655440000"], ["550e8400e29b41d4a716446655440000"]),
    "idn-email": (["a@b.c"], ["a"]),
    "ip": (["1.2.3.4", "::1"], ["1.2.3", ":::1"]),
    "partial-time": (["10:00:00", "23:59:59.5"], ["10:00", "10:00:00Z", "24:00:00"]),
    "partial-date-time": (["2024-02-29T10:00:00"], ["2023-02-29T10:00:00", "2024-02-29T10:00:00Z", "2024-02-29"]),
    "byte": (["YQ==", ""], ["YQ", "YR=="]),
    "cidrv4": (["1.2.3.0/24"], ["1.2.3.0", "1.2.3.0/33", "256.0.0.0/8"]),
    "cidrv6": (["::/0", "2001:db8::/32", "::1/128"], ["::", "::/129", ":::/0"]),
    "ipv6": (
        ["::ffff:1.2.3.4", "1:2:3:4:5:6:7::", "64:ff9b::192.0.2.33", "::1:2:3:4:5:6:7", "1:2:3:4:5:6:1.2.3.4"],
        ["1:2:3:4:5:6:7", "::ffff:1.2.3.400", "1::2::3", "::1.2.3.4:5", "fe80::1%eth0", "1:2:3:4:5:6:7::8"],
    ),
    "e164": (
        ["+4915112345678", "+1234567", "+123456789012345"],
        ["4915112345678", "+0123456789", "+123456", "+1234567890123456"],
    ),
    "ulid": (["01ARZ3NDEKTSV4RRFFQ69G5FAV"], ["81ARZ3NDEKTSV4RRFFQ69G5FAV", "01ARZ3NDEKTSV4RRFFQ69G5FAI"]),
    "nanoid": (["V1StGXR8_Z5jdHi6B-myT"], ["V1StGXR8"]),
    "mac": (["00:1b:63:84:45:e6"], ["00:1B:63:84:45:e6", "00:1b:63:84:45"]),
    "md5_hex": (["d41d8cd98f00b204e9800998ecf8427e"], ["d41d8cd98f00b204e9800998ecf8427"]),
}


@pytest.mark.parametrize("name", ADMITTED)
def test_formats_admit_only_valid_texts(name):
    grammar, (valid, others) = compiled(TOKENIZER, "json_schema", {"type": "string", "format": name}), ADMITTED[name]
    assert [text for text in (*valid, *others) if admits(grammar, json.dumps(text, ensure_ascii=False))] == valid


FORMATTED = [UUID1, UUID3, UUID4, UUID5, UUID6, UUID7, UUID8, Base64Bytes, Base64UrlBytes, IPvAnyAddress, SecretStr]
FORMATTED += [Path, bytes]


@pytest.mark.parametrize("kind", FORMATTED, ids=lambda kind: str(TypeAdapter(kind).json_schema()["format"]))
def test_pydantic_validates_outputs_of_its_formats(kind):
    """`jsonschema` validates none of them."""
    reader, draw = TypeAdapter(kind), random.Random(0)
    grammar = compiled(TOKENIZER, "json_schema", {**reader.json_schema(), "maxLength": 40})
    outputs = [output for output in (random_output(grammar, draw) for _ in range(20)) if output is not None]
    assert len(outputs) >= 10
    for output in outputs:
        reader.validate_json(output)
