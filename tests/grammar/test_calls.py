"""Grammars of tool calls for every model family, with text and reasoning around the calls."""

from __future__ import annotations

import pytest
from support.byte_grammars import admits, byte_tokenizer

from token_recycling.grammar.compile import Grammar
from token_recycling.grammar.parts import FAMILIES, Function, OutputParts, compiled_parts

PARAMETERS = {
    "type": "object",
    "properties": {
        "at": {"type": "integer"},
        "name": {"type": "string", "maxLength": 9},
        "unit": {"enum": ["in km", "m"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["at"],
}
FUNCTIONS = [Function("look", PARAMETERS, strict=True), Function("go"), Function("look_up", {})]
SPECIAL = {
    "kimi": (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    "deepseek_v3_1": tuple(
        f"<\uff5ctool\u2581{name}\uff5c>"
        for name in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
    ),
    "harmony": ("<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>", "<|start|>"),
}  # fmt: skip
"""Special tokens of each tokenizer; other families write their delimiters as text."""
JSON = '{{"name": "{}", "arguments": {}}}'
WRITTEN = {
    "qwen_3": lambda name, at: f"<tool_call>\n{JSON.format(name, at)}\n</tool_call>",
    "qwen_3_coder": lambda name, at: (
        f"<tool_call>\n<function={name}>\n{_tagged(at, _PARAMETER)}</function>\n</tool_call>"
    ),
    "kimi": lambda name, at: (
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{at}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek_v3_1": lambda name, at: (
        f"<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>{name}<\uff5ctool\u2581sep\uff5c>{at}"
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
    ),
    "glm_4_7": lambda name, at: f"<tool_call>{name}\n{_tagged(at, _ARGUMENT)}</tool_call>",
    "harmony": lambda name, at: f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{at}<|call|>",
}
_PARAMETER, _ARGUMENT = "<parameter=at>\n{}\n</parameter>\n", "<arg_key>at</arg_key>\n<arg_value>{}</arg_value>\n"
FREE = ["Just text.", "a < b <tool> {"]


def _tagged(arguments, form):
    return "" if arguments == "{}" else form.format(arguments.removeprefix('{"at": ').removesuffix("}"))


def grammar_of(family, special=True, functions=FUNCTIONS, **how) -> tuple[Grammar, tuple[str, ...]]:
    marks = SPECIAL.get(family, ()) if special else ()
    numbers = {text: 257 + number for number, text in enumerate(marks)}
    return compiled_parts(byte_tokenizer(*marks), OutputParts(family, functions, **how), numbers), marks


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_grammar_admits_the_calls_of_its_family(family, mode, special):
    if not special and family == "harmony":
        pytest.skip("its messages are made of special tokens")
    functions = FUNCTIONS[:1] if mode == "named" else FUNCTIONS
    grammar, marks = grammar_of(family, special, functions, mode=mode)
    look, go, wrong = (
        WRITTEN[family](name, at) for name, at in (("look", '{"at": 12}'), ("go", "{}"), ("look", '{"at": "x"}'))
    )
    assert admits(grammar, look, marks)
    assert admits(grammar, go, marks) == (mode != "named")
    assert not admits(grammar, wrong, marks)
    if family != "harmony":
        assert [admits(grammar, text, marks) for text in FREE] == [mode == "auto"] * 2
        assert admits(grammar, f"Let me see. {look}", marks) == (mode == "auto")
        assert admits(grammar, look + FAMILIES[family].separator + look, marks) == (
            mode != "named" and not FAMILIES[family].section[0]
        )


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "harmony"])
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_reasoning_precedes_calls(family, mode):
    call = WRITTEN[family]("look", '{"at": 12}')
    grammar, marks = grammar_of(family, mode=mode, thinking="possible")
    assert admits(grammar, call, marks)
    assert admits(grammar, f"<think>\nwell, <tool_call> is no call\n</think>\n\n{call}", marks)
    grammar, marks = grammar_of(family, mode=mode, thinking="begun")
    assert admits(grammar, f"well</think>\n\n{call}", marks)
    assert not admits(grammar, call, marks)


def test_channels_of_harmony():
    grammar, marks = grammar_of("harmony")
    analysis = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    assert admits(grammar, analysis + WRITTEN["harmony"]("look", '{"at": 1}'), marks)
    assert admits(grammar, f"{analysis}<|channel|>final<|message|>Just text.", marks)
    required, _ = grammar_of("harmony", mode="required")
    assert not admits(required, "<|channel|>final<|message|>Just text.", marks)
    assert admits(required, " to=functions.go<|channel|>commentary json<|message|>{}<|call|>", marks)


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_constraint_without_functions_applies_after_reasoning(mode):
    """In the final channel if the family has channels."""
    form = ("regex", "[ab]{2}", True)
    grammar, marks = grammar_of("harmony", functions=[], mode=mode, form=form)
    final = "<|channel|>final<|message|>ab"
    assert admits(grammar, final, marks)
    assert admits(grammar, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{final}", marks)
    assert not any(admits(grammar, text, marks) for text in ("ab", f"{final}c"))
    for thinking, texts in (("begun", ["well</think>ab"]), ("possible", ["ab", "<think>hm</think>\n\nab"])):
        grammar, marks = grammar_of("qwen_3", functions=[], mode=mode, form=form, thinking=thinking)
        assert all(admits(grammar, text, marks) for text in texts)
        assert not admits(grammar, f"{texts[0]}c", marks)


def test_without_parallel_calls_only_one_call_is_admitted():
    grammar, _ = grammar_of("qwen_3", parallel=False)
    call = WRITTEN["qwen_3"]("look", '{"at": 12}')
    assert [admits(grammar, text) for text in (call, f"{call}\n{call}", FREE[0])] == [True, False, True]


@pytest.mark.parametrize(
    ("form", "admitted"),
    [
        (
            ("json_schema", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}, True),
            '{"x": 1}',
        ),
        (("regex", "^[a-c]{3}$", True), "abc"),
        (("grammar", 'root ::= "x/" | "y"', True), "x/"),
    ],
)
def test_output_is_a_call_or_satisfies_the_constraint(form, admitted):
    grammar, _ = grammar_of("qwen_3", thinking="possible", form=form)
    call = WRITTEN["qwen_3"]("go", "{}")
    assert [admits(grammar, text) for text in (call, admitted, f"<think>a</think>{admitted}", "no")] == [True] * 3 + [
        False
    ]


@pytest.mark.parametrize("family", ["qwen_3_coder", "glm_4_7"])
def test_tagged_strings_have_no_quotes(family):
    form = {
        "qwen_3_coder": "<parameter={}>\n{}\n</parameter>\n",
        "glm_4_7": "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    }
    grammar, _ = grammar_of(family, mode="required")

    def call(**arguments):
        written = "".join(form[family].format(name, value) for name, value in arguments.items())
        return WRITTEN[family]("go", "{}").replace("go", "look").replace("</", f"{written}</", 1)

    assert admits(grammar, call(at=1, name="a <b>\n&", unit="in km", note="null"))
    assert admits(grammar, call(at=1, note="anything"))
    assert not admits(grammar, call(at=1, name="longer than nine"))
    assert not admits(grammar, call(at=1, unit="mile"))
    assert not admits(grammar, call(name="a"))


@pytest.mark.parametrize("family", ["qwen_3_coder", "glm_4_7"])
@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        ({"enum": ["a", "b"], "pattern": "^a"}, ["a"], ["b"]),
        ({"enum": ["a", 1, 2.5], "type": "integer"}, ["1"], ["a", "2.5"]),
        ({"enum": ["a", 1], "type": "string"}, ["a"], ["1"]),
        ({"enum": [1, 5, 10], "minimum": 5}, ["5", "10"], ["1"]),
        ({"enum": ["a", "b"], "anyOf": [{"const": "b"}, {"$ref": "#/$defs/x"}]}, ["b"], ["a"]),
        ({"anyOf": [{"enum": ["a"]}, {"enum": ["b"], "type": "integer"}]}, ["a"], ["b"]),
        ({"enum": ["é", {"é": 1}], "type": "object"}, ['{"\\u00e9": 1}'], ["é"]),
        ({"const": "a", "maxLength": 1}, ["a"], ["b"]),
        ({"type": "string", "minLength": 2}, ["ab", "a b", "éé"], [" a", "a\n", "a", "  "]),
        ({"type": "string", "pattern": "^.{2}$"}, ["ab"], [" a", "a "]),
        ({"type": "string", "pattern": "^a*$"}, ["", "aa"], ["b"]),
    ],
    ids=str,
)
def test_tagged_values_satisfy_all_keywords_of_their_schema(family, schema, admitted, refused):
    form = {"qwen_3_coder": _PARAMETER, "glm_4_7": _ARGUMENT}[family]
    parameters = {"properties": {"at": schema}, "required": ["at"], "$defs": {"x": {"type": "null"}}}
    grammar, _ = grammar_of(family, functions=[Function("f", parameters, strict=True)], mode="required")

    def call(value):
        return WRITTEN[family]("f", "{}").replace("</", f"{form.format(value)}</", 1)

    assert [admits(grammar, call(value)) for value in admitted] == [True] * len(admitted)
    assert [admits(grammar, call(value)) for value in refused] == [False] * len(refused)


ROOTS = [
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False,
      "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a": 1}', '{}'),
    ({"properties": {"a": {"type": "integer", "minimum": 5, "exclusiveMinimum": True}}, "required": ["a"]},
     '{"a": 6}', '{"a": 5}'),
    ({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, '{"a": null}', "null"),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"a": {"const": 1}}}}}, '{"a": 1}', "3"),
    (None, "{}", '{"a": 1}'),
    ({}, "{}", '{"a": 1}'),
    ({"type": ["object", "null"], "properties": {}}, "{}", "null"),
]  # fmt: skip


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("parameters", "admitted", "refused"), ROOTS)
def test_arguments_are_objects_of_the_parameters_schema(parameters, admitted, refused, strict):
    grammar, _ = grammar_of("qwen_3", functions=[Function("f", parameters, strict)], mode="required")
    assert admits(grammar, WRITTEN["qwen_3"]("f", admitted))
    assert not admits(grammar, WRITTEN["qwen_3"]("f", refused))


@pytest.mark.parametrize(
    ("family", "parameters", "place"),
    [
        ("qwen_3", {"properties": {"a": {"uniqueItems": True}}}, "f: #/properties/a/uniqueItems"),
        ("qwen_3", {"type": "string"}, "f: #"),
        ("qwen_3_coder", {"properties": {"a": {"type": "string", "format": "email"}}}, "f: #/format"),
        ("glm_4_7", {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}]}, "f: #/allOf"),
        ("glm_4_7", {"properties": {"a": {"type": "integer"}}, "const": {"a": 1}}, "f: #/const"),
        ("qwen_3_coder", {"properties": {"a": {}}, "enum": [{"a": "x"}]}, "f: #/enum"),
        ("qwen_3_coder", {"properties": {"a": {"enum": ["x", "y</parameter>"]}}}, "f: #/enum"),
        ("glm_4_7", {"properties": {"a": {"enum": ["x", " y"]}}}, "f: #/enum"),
        ("qwen_3_coder", {"properties": {"a/b>c": {}}}, "f: #/properties/a~1b>c"),
        ("glm_4_7", {"properties": {"a": {}}, "required": ["a\nb"]}, "f: #/properties/a\nb"),
        ("qwen_3_coder", {"properties": {" a": {}}}, "f: #/properties/ a"),
    ],
)
def test_unenforceable_parameters_are_refused_by_function_and_keyword(family, parameters, place):
    with pytest.raises(ValueError, match=place):
        grammar_of(family, functions=[Function("f", parameters, strict=True)])
    if parameters.get("type") != "string":
        grammar, _ = grammar_of(family, functions=[Function("f", parameters)])
        assert [str(lost).partition(": ")[0] for lost in grammar.unenforced] == [place.replace("f: ", "f")]
