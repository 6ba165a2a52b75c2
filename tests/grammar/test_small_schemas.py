"""At least twenty small strict schemas of every kind: outputs are valid by `jsonschema`, or the schema is refused."""

from __future__ import annotations

import itertools
import json
import random
from decimal import Decimal, localcontext
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byte_grammars import admits, byte_tokenizer, random_output
from support.cases import thinned

from token_recycling.grammar.compile import compiled
from token_recycling.grammar.json_schema.errors import UnenforceableError

TOKENIZER = byte_tokenizer()
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
SCALARS = [None, True, False, 0, 1, 1.0, -1, 2, 3, 0.5, 1.5, "", "a", "aé", "\U0001f600", "1", "null"]
SCHEMA = dict[str, Any]


def of(**keywords: Any) -> SCHEMA:
    """Return a schema; a leading `_` of a keyword stands for `$`."""
    return {name.replace("_", "$", 1) if name.startswith("_") else name: value for name, value in keywords.items()}


def obj(**keywords: Any) -> SCHEMA:
    return {"type": "object", **keywords}


def products(*lists: list[Any]) -> list[tuple[Any, ...]]:
    return list(itertools.product(*lists))


TEXT, NUMBER, INTEGER = {"type": "string"}, {"type": "number"}, {"type": "integer"}
CHOICES: list[SCHEMA] = [{"const": 1}, {"type": "string", "maxLength": 2}, {"enum": [None, "a"]}, {"type": "boolean"}]
KEYS = ["a", "", " ", "é", "ключ", "\U0001f600", 'q"q', "b\\b", "n\nn", "a/b", "a~b", "$ref", "a.b", "0", "toString",
        "__proto__", "\u2028", "tab\t", "%25", "日本"]  # fmt: skip
RANGES: list[SCHEMA] = [
    {"minimum": 2}, {"exclusiveMaximum": 1.5}, {"minimum": 0, "maximum": 2}, {"enum": [1, 3]}, {"const": 0.5},
    {"type": "integer", "maximum": 7}, {"type": "number", "exclusiveMinimum": 1}, {"minLength": 2}, {"maxLength": 1},
    {"minItems": 1}, {"maxItems": 1, "minimum": 1},
]  # fmt: skip
NAMES = [{"pattern": "^a"}, {"enum": ["a", "é"]}, {"maxLength": 1}, {"const": "a"}, {"minLength": 2}]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "idn-email",
           "idn-hostname", "iri", "uri-reference", "iri-reference", "json-pointer", "relative-json-pointer", "regex",
           "uri-template", "unknown"]  # fmt: skip
TEXTS: list[SCHEMA] = [
    {"pattern": "^a"}, {"pattern": "b$"}, {"pattern": "^[ab]+$|é"}, {"pattern": "^(a|12)$"}, {"format": "date"},
    {"format": "email"}, {"format": "ipv4"}, {"format": "uuid"}, {"const": "aa"}, {"maxLength": 1},
]  # fmt: skip
FEW: list[SCHEMA] = [
    {"type": "boolean"}, {"type": ["null", "boolean"]}, {"type": "integer", "minimum": 0, "exclusiveMaximum": 2.5},
    {"anyOf": [{"const": 1}, {"type": "null"}]}, {"enum": [1, True, "a", 1.0]},
    {"type": "integer", "minimum": 1, "maximum": 0},
]  # fmt: skip
OPEN: list[SCHEMA] = [
    of(properties=properties, required=required, **more)
    for properties, required, more in [
        ({"a": INTEGER}, ["a"], {}), ({"a": INTEGER}, [], {}), ({"b": TEXT}, ["b"], {}), ({"b": TEXT}, ["b", "c"], {}),
        ({"a": INTEGER, "b": TEXT}, ["a"], {}), ({"b": TEXT}, ["b"], {"additionalProperties": {"type": "integer"}}),
    ]
]  # fmt: skip
KINDS: dict[str, list[SCHEMA]] = {
    "oneOf": [{"oneOf": [one, other]} for one, other in products(CHOICES, CHOICES)]
    + [{"oneOf": [{"oneOf": [one]}, {"const": [3]}]} for one in CHOICES],
    "allOf": [{"allOf": [one, {"anyOf": [other, {"const": 1}, TEXT]}]} for one, other in products(CHOICES, CHOICES)]
    + [{"allOf": [{"allOf": [one]}, {"title": "a"}]} for one in CHOICES],
    "patternProperties": [
        obj(patternProperties={pattern: one}, additionalProperties=more)
        for pattern, one, more in products(
            ["^a", "é$", "^[0-9]+$", "^x{2}$", "a|b"], CHOICES[:2], [False, {"type": "null"}]
        )
    ]
    # These match different names in Python and ECMA-262.
    + [
        obj(patternProperties={pattern: {"const": 1}}, **more)
        for pattern, more in products(
            ["^\\w+$", "^.$", "\\D"], [{}, *({"additionalProperties": one} for one in (True, False, {"type": "null"}))]
        )
    ],
    "dependentRequired": [
        obj(properties={"a": one, "b": TEXT, "c": INTEGER}, dependentRequired=needs, additionalProperties=False)
        for one, needs in products(
            CHOICES, [{"a": ["b"]}, {"b": ["a", "c"]}, {"a": ["b"], "b": ["c"]}, {"a": []}, {"c": ["d"]}]
        )
    ],
    "propertyNames": [obj(propertyNames=names, additionalProperties=one) for names, one in products(NAMES, CHOICES)],
    "uniqueItems": [
        {"type": "array", "items": one, "uniqueItems": True, "maxItems": most, "minItems": least}
        for one, (most, least) in products([*CHOICES, {"const": "a"}], [(0, 0), (1, 0), (1, 1), (2, 0)])
    ],
    "property names": [
        obj(properties={key: {"const": key}}, required=[key], additionalProperties=False) for key in KEYS
    ],
    "formats": [{"type": "string", "format": name} for name in FORMATS],
    "not": [
        {"not": one, **more}
        for one, more in products([*CHOICES, {}], [{}, TEXT, INTEGER, {"type": ["boolean", "null"]}])
    ],
    "if": [
        {"if": one, **more, **branches}
        for one, more, branches in products(
            [
                *CHOICES[1:],
                obj(required=["a"]),
                {"properties": {"a": CHOICES[2]}},
                {"properties": {"a": {"const": "a"}}},
            ],
            [{}, obj(properties={"a": TEXT, "b": INTEGER})],
            [{"then": {"required": ["b"]}}, {"then": TEXT, "else": obj(required=["a"])}],
        )
    ],
    "not within a range": [
        {"not": one, **more} for one, more in products(RANGES, [INTEGER, NUMBER, TEXT, {"type": ["array", "integer"]}])
    ],
    "one of two ranges": [
        {"type": kind, "oneOf": [*pair]}
        for kind in ("integer", "number", "string")
        for pair in itertools.combinations(RANGES, 2)
    ],
    "if within a range": [
        obj(properties={"a": {"$ref": "#/$defs/n"}}, required=["a"], **{"$defs": {"n": one, "r": other}})
        | {
            "if": {"properties": {"a": {"$ref": "#/$defs/r"}}},
            "then": {"required": ["b"]},
            "else": {"maxProperties": 1},
        }
        for one, other in products([INTEGER, NUMBER, TEXT], RANGES)
    ],
    "conditions on one property": [
        obj(
            properties={"a": {"enum": [*"abcdefghijk"[:number], *more]}, "b": TEXT},
            required=needed,
            allOf=[
                {
                    "if": obj(properties={"a": {"const": name}}, required=required),
                    "then": {"properties": {"b": {"const": name}}},
                    **otherwise,
                }
                for name in "abcdefghijk"[:number]
            ],
        )
        for number, more, needed, required, otherwise in products(
            [2, 11],
            [[], ["z"]],
            [["a"], ["a", "b"]],
            [[], ["a"]],
            [{}, {"else": {"properties": {"b": {"maxLength": 1}}}}],
        )
    ],
    "one of two closed objects": [
        {**more, "oneOf": [{**one, "additionalProperties": False}, {**other, "additionalProperties": False}]}
        for more, (one, other) in products(
            [{}, {"type": ["object", "null"]}],
            [
                *itertools.combinations(
                    [
                        of(properties=properties, required=required)
                        for properties in ({"a": INTEGER}, {"a": INTEGER, "b": TEXT}, {"b": TEXT, "c": TEXT})
                        for required in ([], ["a"], ["b"])
                    ],
                    2,
                )
            ],
        )
    ],
    "one of two objects": [
        {**more, "oneOf": [{**kind, **one}, {"$ref": "#/$defs/other"}], "$defs": {"other": {"type": "object", **other}}}
        for (more, kind), one, other in products(
            [({}, {"type": "object"}), ({"type": "object"}, {}), ({}, {})],
            OPEN,
            [*OPEN, {"required": ["b"], "not": {"required": ["a"]}}],
        )
    ],
    "contains": [
        {**array, "contains": one, **counts}
        for array, one, counts in products(
            [
                {"type": "array", "items": {"enum": [1, 1.5, "a", None]}, "maxItems": 3},
                {"type": ["array", "null"], "prefixItems": [TEXT, {}], "items": False},
                {"minItems": 1, "maxItems": 4, "items": {"type": ["integer", "string"]}},
                {"type": "array", "items": {"enum": [1, "a"]}},
            ],
            [INTEGER, {"const": "a"}, TEXT],
            [{}, {"minContains": 2}, {"minContains": 0, "maxContains": 0}, {"maxContains": 2}],
        )
    ],
    "not one of two texts": [
        {**kind, "not": {"anyOf": [one, other]}}
        for kind in (TEXT, {"type": ["string", "null"]})
        for one, other in itertools.combinations(TEXTS, 2)
    ],
    "one of two texts": [{"oneOf": [{**TEXT, **one}, other]} for one, other in itertools.combinations(TEXTS, 2)],
    "disjoint texts": [
        obj(properties={"a": {**TEXT, "oneOf": [{"pattern": one}, {"pattern": other}]}}, required=["a"])
        for one, other in itertools.combinations(
            ["^[^:]+$", r"^\w+:\w+$", "^a:.*:b$", r"^\d{2}:$", "^(?:get|set)::?a", "^$", "b|é:"], 2
        )
    ],
    "different items": [
        {"type": "array", "prefixItems": [one, other], "items": more, "uniqueItems": True}
        for one, other, more in products(FEW, FEW, [False, {"enum": ["a", 1, None]}])
    ],
    "one of two lists": [
        {"oneOf": [{"type": "array", "minItems": 1, **one}, {"type": "array", **other}]}
        for one, other in itertools.permutations(
            [
                {"items": INTEGER},
                {"items": TEXT},
                {"prefixItems": [{"type": "null"}]},
                {"items": {"type": "array"}},
                {},
            ],
            2,
        )
    ],
    "dynamic references": [
        of(_dynamicAnchor=anchor, anyOf=[one, array], **{"$defs": {"d": {"$anchor": "other"}}})
        for anchor, one, reference in products(["n", "m"], CHOICES, ["#n", "#", "#/anyOf/0", "#other"])
        for array in [{"type": "array", "items": of(_dynamicRef=reference), "maxItems": 1}]
    ],
    "number of properties": [
        obj(properties=dict.fromkeys("abc", one), additionalProperties=False, minProperties=least, maxProperties=most)
        for one, least, most in products(CHOICES, [0, 1, 2], [1, 2, 3])
    ],
}
FEWEST = {
    "propertyNames": 20,
    "one of two lists": 8,
    "one of two objects": 41,
    "disjoint texts": 9,
    "not": 8,
    "if": 16,
    "number of properties": 30,
}
"""The fewest enforced schemas of a kind, where it is not half of them."""
VALUES: list[Any] = [
    *SCALARS, [], {}, [1], [1, 1], ["a"], ["a", "a"], [None, "a"], ["a", "b"], [1, "a", None, True], [3], [[]],
    [[], []], {"a": 1}, {"a": "a"}, {"a": None}, {"b": 1}, {"é": 1}, {"aa": 1}, {"xx": "a"}, {"12": 1},
    {"a": 1, "b": "a"}, {"a": 1, "b": "a", "c": 1}, {"b": "a"}, {"c": 1}, "aa", "aaa", "é", "éa", "b", "ab", "ba",
    ".", " ", "\n", "e\u0301", "123456", 2.5, 7, 8, 10, -7, "2024-02-29", "2023-02-29", "12:00:00Z", "25:00:00Z",
    "2024-01-31T10:00:00Z", "P1D", "a@b.c", "b.c", "1.2.3.4", "1.2.3.400", "::1", "http://a/b",
    "550e8400-e29b-41d4-a716-446655440000", "/a", "0/a", "[", "{a}", 2**63 - 1, 2**63, -(2**63), {"é": None},
    {"٣": None}, {"a": "a", "b": "a"}, {"a": "a", "b": "b"}, {"a": "b", "b": "b"}, {"a": "k", "b": "k"},
    {"a": "k", "b": "a"}, {"a": "z", "b": "zz"}, {"a": "z", "b": "z"}, {"a": "z"},
]  # fmt: skip


@pytest.mark.parametrize("kind", thinned(KINDS, 2))
def test_outputs_of_small_schemas_are_valid(kind):
    assert len(KINDS[kind]) >= 20
    wrong, enforced = [], 0
    for number, schema in enumerate(KINDS[kind]):
        try:
            grammar = compiled(TOKENIZER, "json_schema", schema)
        except ValueError:
            continue
        enforced += 1
        validator, draw = jsonschema.Draft202012Validator(schema, format_checker=CHECKER), random.Random(number)
        outputs = [json.dumps(value, ensure_ascii=False) for value in VALUES]
        outputs = [output for output in outputs if admits(grammar, output)]
        outputs += [output.decode() for _ in range(6) if (output := random_output(grammar, draw)) is not None]
        wrong += [(schema, output) for output in outputs if not validator.is_valid(json.loads(output))]
    assert wrong == []
    assert enforced >= FEWEST.get(kind, len(KINDS[kind]) // 2), "fewer schemas of this kind are enforced"


BOUNDARIES = st.one_of(
    st.sampled_from([0, 1, 0.1, 0.3, 99.5, 2**53, 1e16, 1e-7, 5e-324]),
    st.floats(0, 9e18),
    st.integers(0, 2**62),
    st.builds(lambda digits, exponent: digits * 10.0**exponent, st.integers(1, 99), st.integers(-12, 16)),
)


@settings(max_examples=40)
@given(BOUNDARIES, st.booleans(), st.sampled_from(["integer", "number"]), st.sampled_from(["minimum", "maximum"]))
def test_no_admitted_number_parses_beyond_a_limit(bound, negative, kind, name):
    """For example, 0.29999999999999999 is parsed as 0.3, which `exclusiveMaximum` may forbid."""
    bound = -bound if negative else bound
    exact = Decimal(bound) if isinstance(bound, int) else Decimal(repr(bound))
    steps = [sign * digit * Decimal(10) ** -place for place in range(22) for digit in (1, 5, 9) for sign in (-1, 1)]
    with localcontext(prec=60):
        texts = [format(exact + step, "f") for step in [Decimal(0), *steps]]
    for keyword in (name, f"exclusive{name.capitalize()}"):
        schema = {"type": kind, keyword: bound}
        try:
            grammar = compiled(TOKENIZER, "json_schema", schema)
        except UnenforceableError as error:
            assert all(lost.keyword.lower().endswith(name) for lost in error.unenforced)  # noqa: PT017
            continue
        validator = jsonschema.Draft202012Validator(schema)
        assert [text for text in texts if admits(grammar, text) and not validator.is_valid(json.loads(text))] == []


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]),
        st.builds(lambda digits, places: digits / 10**places, st.integers(-9999, 9999), st.integers(0, 3)),
        max_size=2,
    ),
    st.sampled_from(
        [
            {},
            {"multipleOf": 0.25},
            {"multipleOf": 0.625},
            {"not": {"minimum": 0.75}},
            {"oneOf": [{"maximum": 1.25}, {"minimum": 1.5}]},
        ]
    ),
)
def test_all_short_numbers_within_limits_are_admitted(limits, more):
    """For example 0.9 below an `exclusiveMaximum` of 1, and 0.7 below 0.75."""
    schema = {"type": "number", **limits, **more}
    validator = jsonschema.Draft202012Validator(schema)
    thresholds = {round(limit) for limit in (*limits.values(), 0, 1)}
    numbers = {threshold + Decimal(step) / 100 for threshold in thresholds for step in range(-150, 151)}
    texts = [format(number.normalize() + 0, "f") for number in numbers]
    valid = {text for text in texts if validator.is_valid(json.loads(text))}
    try:
        grammar = compiled(TOKENIZER, "json_schema", schema)
    except ValueError as error:
        assert "admits no value" in str(error)  # noqa: PT017
        assert not valid
        return
    assert {text for text in texts if admits(grammar, text)} == valid


@pytest.mark.parametrize("step", [2, 3, 0.5, 1.5, 2.5, 0.03125])
def test_admitted_multiples_are_valid_after_parsing(step):
    schema = {"type": "number", "multipleOf": step}
    validator, grammar = jsonschema.Draft202012Validator(schema), compiled(TOKENIZER, "json_schema", schema)
    numbers = [Decimal(step) * (10**exponent + extra) for exponent in range(20) for extra in (0, 1, 3, 7)]
    texts = [format(number, "f") for number in numbers]
    texts += [f"{text}.0" for text in texts if "." not in text]
    admitted = [text for text in texts if admits(grammar, text)]
    assert len(admitted) > 40
    assert [text for text in admitted if not validator.is_valid(json.loads(text))] == []


@pytest.mark.parametrize("step", [0.1, 0.01, 0.3, 1.1, 0.07])
def test_bounded_multiples_are_those_that_validators_accept(step):
    """They are multiples both in float64 and exactly."""
    schema = {"type": "number", "multipleOf": step, "minimum": -1, "exclusiveMaximum": 3}
    validator, grammar = jsonschema.Draft202012Validator(schema), compiled(TOKENIZER, "json_schema", schema)
    texts = [format((number * Decimal("0.01")).normalize(), "f") for number in range(-110, 310)]
    found = [text for text in texts if validator.is_valid(json.loads(text)) and not Decimal(text) % Decimal(str(step))]
    assert [text for text in texts if admits(grammar, text)] == found
    assert len(found) > 2


@pytest.mark.parametrize("step", [0.1, 0.01, 0.3, 1.1])
def test_multiples_that_validators_would_reject_are_refused(step):
    """0.07 / 0.01 is 7.000000000000001 in float64."""
    with pytest.raises(ValueError, match=r"#/multipleOf: .* float64"):
        compiled(TOKENIZER, "json_schema", {"type": "number", "multipleOf": step})


@pytest.mark.parametrize(
    ("draft", "schema"),
    [
        ("07", {"type": "array", "prefixItems": [TEXT], "items": INTEGER}),
        ("07", {"type": "array", "contains": TEXT, "minContains": 0}),
        ("04", {"oneOf": [{"type": "null", "const": "a"}, {"type": "null"}]}),
    ],
)
def test_keywords_of_another_draft_are_refused(draft, schema):
    with pytest.raises(ValueError, match=f"is not a keyword of draft {draft}"):
        compiled(TOKENIZER, "json_schema", {"$schema": f"http://json-schema.org/draft-{draft}/schema#", **schema})


@pytest.mark.parametrize("bounds", [{"minimum": 1e19, "maximum": 1e20}, {"exclusiveMaximum": -1e19, "minimum": -1e20}])
def test_integer_ranges_beyond_64_bits_are_refused(bounds):
    with pytest.raises(ValueError, match=r"beyond 2\*\*63"):
        compiled(TOKENIZER, "json_schema", {"type": "integer", **bounds})
