"""Tool calls and reasoning."""

import json
import types
from functools import partial

import jsonschema
import pytest
import torch
from support import tiny
from support.byte_grammars import admits, byte_tokenizer
from support.functions import ASKED, FLAT, SAID, TOOLS
from support.openai_answers import chat, streamed_chat
from support.speaking import chat_tokenizer
from transformers import GenerationConfig

from token_recycling.grammar.parts import Function, FunctionError, OutputParts, compiled_parts
from token_recycling.model.loading import Loaded
from token_recycling.serving.api.responses import ResponsesRequest
from token_recycling.serving.output import Delta, Output, ParsedReader, ScoredToken, StopTrimmer, merged, whole
from token_recycling.serving.prompt import render_prompt, response_parser

THOUGHT, OPEN, CLOSE = "<think>well</think>", "<tool_call>", "</tool_call>"
CALL = ("look", {"at": 1})
CALLED = f'{OPEN}{{"name": "look", "arguments": {{}}}}{CLOSE}'
CLAUDES = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]
NO_CALLS = ("{'at'", "[]", '{"name": "look"}', '{"name": "look", "arguments": [1]}')


def _call(at):
    """Return a call of `look` whose argument may contain delimiters."""
    return f"{OPEN}{json.dumps({'name': 'look', 'arguments': {'at': at}})}{CLOSE}"


READ = [
    # Output, then its text, reasoning, calls and finish reason.
    (SAID, "Let me see.", None, [CALL], "tool_calls"),
    (SAID * 2, "Let me see.Let me see.", None, [CALL, CALL], "tool_calls"),
    (f"{THOUGHT}done", "done", "well", [], "stop"),
    *((f"<think>{thought or ''}", "", thought, [], "stop") for thought in ("well", None)),  # no closing delimiter
    (f"{THOUGHT}{SAID}", "Let me see.", "well", [CALL], "tool_calls"),
    (f"{SAID}{OPEN}{{", "Let me see.", None, [CALL], "tool_calls"),
    (f'{OPEN}{{"name": "lo\nok", "arguments": {{}}}}{CLOSE}', None, None, [("lo\nok", {})], "tool_calls"),
    (f"{SAID[11:]}\n", None, None, [CALL], "tool_calls"),  # vllm-project/vllm#28331
    (f"{SAID}\n \nSo.\n", "Let me see.\n \nSo.\n", None, [CALL], "tool_calls"),
    (f"{SAID}{OPEN}[]{CLOSE}\n", "Let me see.[]\n", None, [CALL], "tool_calls"),
    *(
        (f"{_call(at)}So.{SAID}", "So.Let me see.", None, [("look", {"at": at}), CALL], "tool_calls")
        for at in (CLOSE, f'<"{CLOSE}{SAID}\\', f"<{{a\\n{CLOSE}", {CLOSE: [f"\\{OPEN}", CLOSE]})
    ),
    *((f"Well.{OPEN}{one}{CLOSE}", f"Well.{one}", None, [], "stop") for one in NO_CALLS),
    *((f"Well.{OPEN}{one}", f"Well.{one}", None, [], "stop") for one in NO_CALLS),
]


@pytest.mark.parametrize(("said", "text", "thought", "calls", "reason"), READ)
def test_calls_and_reasoning_are_separated_from_text(server, says, said, text, thought, calls, reason):
    """Malformed calls are returned as text: other content between the delimiters, or no closing delimiter."""
    says(said)
    choice = chat(server, tools=TOOLS, max_tokens=200).choices[0]
    made = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    assert (made, choice.finish_reason) == (calls, reason)
    assert (choice.message.content, choice.message.model_extra.get("reasoning_content")) == (text, thought)


def test_special_tokens_except_delimiters_are_not_shown(tokenizer):
    """Although all of them end the output, as some clients ask."""
    template, tokenizer = tokenizer.response_template, tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<mark>", "</think>"]})
    parser = partial(tokenizer.get_response_parser, template, prefix="")
    output = Output(tokenizer, GenerationConfig(eos_token_id=tokenizer.all_special_ids), parser)
    written = tokenizer("<think>we<mark>ll</think>do<mark>ne<mark>")["input_ids"]
    shown = whole([output.push([ScoredToken(token)]) for token in written] + [output.end()])
    assert (shown.of("reasoning"), shown.of("text")) == ("well", "done")
    assert shown.offsets == [len(tokenizer.decode(written[:end])) for end in range(len(written))]


def test_response_items_with_calls_become_a_chat(tokenizer, monkeypatch):
    def thought(text):
        return {"type": "reasoning", "id": text, "content": [{"type": "reasoning_text", "text": text}]}

    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "where?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        *map(thought, "st"),
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "one", "name": "look", "arguments": '{"at": 1}'},
        thought("u"),
        {"type": "function_call", "call_id": "two", "name": "look", "arguments": '{"at": 2}'},
        {"type": "function_call_output", "call_id": "one", "output": "here"},
    ]
    body = ResponsesRequest(input=items, instructions="Be brief.", tools=FLAT, tool_choice="auto").as_chat()
    assert body.shown_tools == TOOLS
    assert [message.model_extra.get("reasoning_content") for message in body.messages] == [None, None, "stu", None]
    shown = "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.tool_call_id }}|{% for c in m.tool_calls or [] %}"
    shown += "{{ c.id }}:{{ c.function.name }}={{ c.function.arguments.at }} {% endfor %}{{ '\\n' }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", shown)
    text = tokenizer.decode(render_prompt(tokenizer, body.messages)[0])
    said = ["system|Be brief.||", "user|where?||", "assistant|Let me see.||one:look=1 two:look=2 ", "tool|here|one|"]
    assert text.splitlines() == said


@pytest.mark.parametrize("added", [False, True])
def test_functions_of_a_namespace_are_called_by_their_own_name(server, says, added):
    """Codex sends the functions of MCP servers in namespaces, some models' in items (openai/codex#32318)."""
    other = [{"type": "custom", "name": "exec"}, {"type": "function", "name": "go__on"}]
    groups = [{"type": "namespace", "name": "mcp__repl", "tools": tools} for tools in (FLAT, other)]
    item, output = {"type": "additional_tools", "role": "developer", "tools": groups}, "function_call_output"
    called = {"type": "function_call", "call_id": "one", "namespace": "mcp__repl", "name": "look", "arguments": "{}"}
    items = [item] * added + [*ASKED, called, {"type": output, "call_id": "one", "output": "here"}]
    body = {"input": items, "tools": [*FLAT, *([] if added else groups)]}
    sent = ResponsesRequest(**body).as_chat()
    names = [tool["function"]["name"] for tool in sent.shown_tools]
    assert (names, sent.messages[1].tool_calls[0].function.name) == (
        ["look", "mcp__repl__look", "mcp__repl__go__on"],
        names[1],
    )
    for name, shown in zip(names, (("look", None), ("look", "mcp__repl"), ("go__on", "mcp__repl")), strict=True):
        says(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>')
        for stream in (server.client().responses.stream, None):
            if stream is None:
                (call,) = server.client().responses.create(model="tiny", **body).output
            else:
                with stream(model="tiny", **body) as events:
                    (call,) = events.get_final_response().output
            assert (call.name, call.namespace) == shown


WRITTEN = {
    "qwen3": '<think>\nwell\n</think>\n\nyes\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    "<|im_end|>",
    "qwen3_5": "<think>\nwell\n</think>\n\nyes\n<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n<|endoftext|>",
    "gemma4": "<|channel>thought\nwell<channel|>yes<|tool_call>call:look{at:1}<tool_call|><turn|>",
}


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("name", ["look", "mcp__maps__look-up.at"])
def test_calls_of_model_families_are_parsed(family, name):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "<function=" if family == "qwen3_5" else "<tool_call>"
    config = types.SimpleNamespace(model_type=family)
    loaded = Loaded(types.SimpleNamespace(config=config), tokenizer)
    new_parser = response_parser(loaded, torch.empty(1, 0, dtype=torch.long), TOOLS)
    output = ParsedReader(tokenizer, StopTrimmer(()), new_parser)
    delta = Delta([*output.begin(), *output.feed(WRITTEN[family].replace("look", name))])
    output.end(True, delta)
    assert (delta.of("reasoning").strip(), delta.of("text").strip()) == ("well", "yes")
    (call,) = delta.calls
    assert (call.name, int(json.loads(call.text)["at"])) == (name, 1)
    config.model_type = "llama"
    assert response_parser(loaded, torch.empty(1, 0, dtype=torch.long), None) is None


@pytest.mark.parametrize("name", ["page-size", "user.id", "$filter", "@type", "a b", "a/b", "größe", "x_1"])
def test_arguments_of_gemma_have_any_name(name):
    tokenizer = tiny.tokenizer()
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="gemma4")), tokenizer)
    new_parser = response_parser(loaded, torch.empty(1, 0, dtype=torch.long), TOOLS)
    output = ParsedReader(tokenizer, StopTrimmer(()), new_parser)
    text = 'say "a", {b-c:1}\n'
    written = f'<|tool_call>call:look{{{name}:[1,{{Content-Type:<|"|>{text}<|"|>}}],at:<|"|><|"|>, {name}2:null}}'
    (call,) = Delta(output.feed(f"{written}<tool_call|>")).calls
    assert json.loads(call.text) == {name: [1, {"Content-Type": text}], "at": "", f"{name}2": None}


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("asked", ["a", "<think>", "<tool_call>", CALLED])
def test_conversation_is_no_part_of_the_answer(asked, begun):
    """DeepSeek's distilled Qwen models have Qwen's architecture and another chat template."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}<|Assistant|>"
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="qwen2")), tokenizer)
    prompt = tokenizer(f"{asked}<|Assistant|>" + "<think>\n" * begun, return_tensors="pt")["input_ids"]
    for prompted in (False, True):
        output = ParsedReader(tokenizer, StopTrimmer(()), response_parser(loaded, prompt, TOOLS, prompted))
        pieces = merged([*output.begin(), *output.feed("well</think>yes" if begun else "yes", last=True)])
        wanted = [("reasoning", "well")] * begun + [("text", "yes")]
        assert [(piece.kind, piece.text) for piece in pieces] == wanted


@pytest.mark.parametrize("begun", ["", "<think>\n\n</think>\n\n", "so ", "so\n"])
def test_text_after_a_call_is_complete(begun):
    """The delimiter of a call includes the spaces at the end of the prompt, as with thinking switched off."""
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="qwen3")), chat_tokenizer())
    prompt = loaded.tokenizer(f"<|im_start|>assistant\n{begun}", return_tensors="pt")["input_ids"]
    output = ParsedReader(loaded.tokenizer, StopTrimmer(()), response_parser(loaded, prompt, TOOLS))
    pieces = [*output.begin(), *output.feed(f"{CALLED}Done.{CALLED}", last=True)]
    assert [piece.text for piece in merged(pieces) if piece.kind == "text"] == ["Done."]


BARE = "<function=look>\n<parameter=at>\n1\n</parameter>\n</function>"


@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        (f"I look.\n\n{BARE}\n{CLOSE}", "I look.", 1),
        (BARE, "", 1),
        (f"{BARE}{CLOSE}\n{BARE}\n{CLOSE}", "", 2),
        (f"{BARE.replace('look', 'go')}\n{CLOSE}", f"{BARE.replace('look', 'go')}\n{CLOSE}", 0),
        ("Write <function=look> first.", "Write <function=look> first.", 0),
    ],
)
def test_xml_call_of_a_tool_may_lack_its_first_delimiter(said, text, calls, piece):
    """See ollama/ollama#16686. Within a grammar, calls have all delimiters, and anything else is text."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "<function="
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="qwen3_5")), tokenizer)
    for constrained, wanted in ((False, (text, calls)), (True, (said, 0))):
        prompt = torch.empty(1, 0, dtype=torch.long)
        new_parser = response_parser(loaded, prompt, TOOLS, constrained=constrained)
        output = ParsedReader(tokenizer, StopTrimmer(()), new_parser)
        parts = [said[at : at + piece] for at in range(0, len(said), piece)]
        shown = Delta([one for part in parts for one in output.feed(part)] + output.feed("", last=True))
        assert (shown.of("text"), len(shown.calls)) == wanted


@pytest.mark.parametrize("constrained", [True, False])
def test_argument_may_lack_the_delimiter_before_the_next_one(constrained):
    """Only before an argument of a tool; within a grammar, all have delimiters."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "<function="
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="qwen3_5")), tokenizer)
    parameters = {"type": "object", "properties": {"at": {"type": "string"}, "n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    new_parser = response_parser(loaded, torch.empty(1, 0, dtype=torch.long), tools, constrained=constrained)
    output = ParsedReader(tokenizer, StopTrimmer(()), new_parser)
    first, second = "a\n<parameter=b>\n c\n", "<parameter=n>\n2"
    (call,) = Delta(output.feed(f"{_unquoted(first + second)}<|im_end|>")).calls
    wanted = {"at": first + second} if constrained else {"at": first.removesuffix("\n"), "n": 2}
    assert json.loads(call.text) == wanted


@pytest.mark.parametrize("said", ["", "<think>well</think>"])
def test_text_about_delimiters_of_reasoning_is_text(said):
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="qwen3")), chat_tokenizer())
    prompt = loaded.tokenizer("<|im_start|>assistant\n", return_tensors="pt")["input_ids"]
    output = ParsedReader(loaded.tokenizer, StopTrimmer(()), response_parser(loaded, prompt, None))
    text = "Write <think>, then </think>."
    pieces = merged([*output.begin(), *output.feed(f"{said}{text}", last=True)])
    assert [(piece.kind, piece.text) for piece in pieces] == [("reasoning", "well")] * bool(said) + [("text", text)]


def test_only_two_line_ends_after_reasoning_are_left_out(tokenizer):
    output = ParsedReader(tokenizer, StopTrimmer(()), partial(tokenizer.get_response_parser, prefix=""))
    pieces = [piece for text in ("<think>a</think>\n", "\n", "\n", "b\n\nc") for piece in output.feed(text)]
    assert Delta([*pieces, *output.feed("", last=True)]).of("text") == "\nb\n\nc"


def test_call_nested_too_deeply_is_text(tokenizer):
    nested = f'{{"arguments": {{"at": {"[" * 100_000}{"]" * 100_000}}}, "name": "look"}}'
    output = ParsedReader(tokenizer, StopTrimmer(()), partial(tokenizer.get_response_parser, prefix=""))
    (piece,) = merged(output.feed(f"<tool_call>{nested}</tool_call>", last=True))
    assert piece.kind == "text"
    assert nested in piece.text


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"$ref": "#/$defs/point"}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/level"}, "2", 2),
        ({"enum": [1, 2.5]}, "2.5", 2.5),
        ({"const": True}, "true", True),
        ({"allOf": [{"$ref": "#/$defs/level"}], "description": "1 or 2"}, "1", 1),
        ({"enum": ["1", "true"]}, "1", "1"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string"}, "12", "12"),
        ({"type": "string"}, "    if a:\n        return\n", "    if a:\n        return\n"),  # vllm#48753
        ({"type": "string"}, "\n\n", "\n\n"),
        ({"type": "string"}, "", ""),
        ({"type": ["integer", "null"]}, " 1\n", 1),
        ({}, "12", "12"),
    ],
    ids=str,
)
def test_unquoted_arguments_have_the_types_of_their_schemas(schema, written, value):
    defs = {"point": {"type": "object", "properties": {"x": {"type": "integer"}}}, "level": {"enum": [1, 2]}}
    assert _read({"type": "object", "properties": {"at": schema}, "$defs": defs}, _unquoted(written)) == value


def _unquoted(written):
    return f"<tool_call>\n<function=look>\n<parameter=at>\n{written}\n</parameter>\n</function>\n</tool_call>"


def _read(parameters, call):
    """Return the parsed value of the argument `at`."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "<function="
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="qwen3_5")), tokenizer)
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    output = ParsedReader(
        tokenizer, StopTrimmer(()), response_parser(loaded, torch.empty(1, 0, dtype=torch.long), tools)
    )
    (piece,) = Delta([*output.begin(), *output.feed(f"{call}<|im_end|>")]).calls
    return json.loads(piece.text)["at"]


UNQUOTED = [
    "ab",
    "abcde",
    "12",
    "3",
    "-5",
    "1.5",
    "true",
    "null",
    "[1]",
    '["a"]',
    '{"a": 1}',
    "auto",
    "red",
    "a\n</parameter>\nbcd",
]


@pytest.mark.parametrize(
    ("schema", "admitted"),
    [
        ({"$ref": "#/$defs/color"}, ["red"]),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, ["null", "red"]),
        ({"$ref": "#/$defs/list"}, [text for text in UNQUOTED if text != "[1]" and "</" not in text]),
        ({"anyOf": [{"type": "string", "minLength": 6}, {"type": "null"}]}, ["null", '{"a": 1}']),
        (
            {"anyOf": [{"type": "string", "pattern": "^a"}, {"type": "integer"}]},
            ["ab", "abcde", "12", "3", "-5", "auto"],
        ),
        ({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}, ["12", "3", "auto"]),
        ({"maxLength": 4}, ["ab", "12", "3", "-5", "1.5", "true", "null", "[1]", "auto", "red"]),
        ({"enum": ["12", "auto"]}, ["12", "auto"]),
        ({"type": "string", "minLength": 13}, []),
        ({"anyOf": [{"type": "string", "minLength": 3, "maxLength": 2}, {"type": "integer"}]}, ["12", "3", "-5"]),
        ({"enum": ["12", 3]}, None),
        ({"minLength": 3, "maxLength": 2}, None),
        ({"anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}, None),
    ],
    ids=str,
)
def test_arguments_without_quotes_are_read_as_values_of_their_schemas(schema, admitted):
    """Where a text could be read as another value, the schema is refused."""
    texts = {"type": "string"}
    defs = {
        "color": {"type": "string", "enum": ["red"]},
        "list": {"anyOf": [texts, {"type": "array", "items": {"$ref": "#/$defs/list"}, "minItems": 1}]},
    }
    for properties in ({"properties": {"of": texts, "by": texts, "at": schema}}, {"additionalProperties": schema}):
        parameters = {**properties, "required": ["at"], "$defs": defs}
        parts = OutputParts("qwen_3_coder", [Function("look", parameters, strict=True)], "required")
        if admitted is None:
            with pytest.raises(FunctionError, match="not JSON"):
                compiled_parts(byte_tokenizer(), parts, {})
            continue
        grammar = compiled_parts(byte_tokenizer(), parts, {})
        assert [text for text in UNQUOTED if admits(grammar, _unquoted(text))] == admitted
        for text in admitted:
            jsonschema.validate(_read(parameters, _unquoted(text)), {**schema, "$defs": defs})


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_output_that_looks_like_a_call_is_text_without_tools(server, says, more):
    """See vllm-project/vllm#55080."""
    says(f"{THOUGHT}{SAID}")
    choice = chat(server, max_tokens=200, **more).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (SAID, None, "stop")
    assert choice.message.model_extra["reasoning_content"] == "well"
    events = streamed_chat(server, max_tokens=200, **more)
    assert "".join(event.choices[0].delta.content or "" for event in events) == SAID


def test_tool_choice_none_hides_the_tools(server):
    shown = chat(server, tools=TOOLS, max_tokens=1).usage.prompt_tokens
    hidden = chat(server, tools=TOOLS, tool_choice="none", max_tokens=1).usage.prompt_tokens
    assert shown > hidden == chat(server, max_tokens=1).usage.prompt_tokens


@pytest.mark.parametrize("arguments", ['{"at": "a long', '{"at": 1}', '{"at": 1}}'])
def test_truncated_call_is_shown_as_far_as_generated(server, says, tokenizer, arguments):
    """Streamed or whole, within its arguments or after them."""
    begun = f'<tool_call>{{"name": "look", "arguments": {arguments}'
    says(f"{begun} story")
    limit, arguments = len(tokenizer(begun)["input_ids"]), arguments.replace("}}", "}")
    events = streamed_chat(server, tools=TOOLS, max_tokens=limit)
    calls = [call.function for event in events for call in event.choices[0].delta.tool_calls or []]
    assert (calls[0].name, "".join(call.arguments for call in calls)) == ("look", arguments)
    assert events[-1].choices[0].finish_reason == "length"
    whole = chat(server, tools=TOOLS, max_tokens=limit).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments, whole.finish_reason) == ("look", arguments, "length")
    with server.client().responses.stream(model="tiny", input="a", tools=FLAT, max_output_tokens=limit) as stream:
        final = stream.get_final_response()
    assert (final.status, final.output[0].status, final.output[0].arguments) == ("incomplete",) * 2 + (arguments,)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_runner_of_anthropic_repeats_its_request_without_a_thread(server, says, stream):
    """It asks the server to store the conversation, and repeats a request that is refused with certain details."""
    anthropic = pytest.importorskip("anthropic")
    says(SAID)
    looked = []

    @anthropic.beta_tool
    def look(at: int) -> str:
        """Look."""
        looked.append(at)
        return "here"

    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    body = {"model": "tiny", "max_tokens": 200, "messages": ASKED, "max_iterations": 2, "stream": stream}
    replies = list(client.beta.messages.tool_runner(tools=[look], **body))
    assert (len(replies), looked[0]) == (2, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_arguments_are_returned_as_a_call(server, says, stream):
    says('<tool_call>{"name": "look", "arguments": {"at": }}</tool_call>')
    if stream:
        events = streamed_chat(server, tools=TOOLS, max_tokens=200)
        calls = [call.function.arguments for event in events for call in event.choices[0].delta.tool_calls or []]
        assert ("".join(calls), events[-1].choices[0].finish_reason) == ('{"at": }', "tool_calls")
        return
    choice = chat(server, tools=TOOLS, max_tokens=200).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.arguments, choice.finish_reason) == ('{"at": }', "tool_calls")
    body = {"messages": ASKED, "max_tokens": 200, "tools": CLAUDES}
    (block,) = server.post("/v1/messages", body).json()["content"]
    assert block["input"] == {"INVALID_JSON": '{"at": }'}


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_numbers_that_json_cannot_represent_are_returned_as_a_call(server, says, number):
    says(f'<tool_call>{{"name": "look", "arguments": {{"at": {number}}}}}</tool_call>')
    (call,) = chat(server, tools=TOOLS, max_tokens=200).choices[0].message.tool_calls
    assert call.function.arguments == f'{{"at": {number}}}'
    (block,) = server.post("/v1/messages", {"messages": ASKED, "max_tokens": 200, "tools": CLAUDES}).json()["content"]
    assert block["input"] == {"INVALID_JSON": call.function.arguments}


@pytest.mark.parametrize("escape", [r"\ud83d", r"\q", r"\u12"])
def test_escapes_that_json_or_utf8_cannot_represent_fail_no_request(server, says, escape):
    """In arguments that are not streamed, lone surrogates stay escaped. In names, the call is text."""
    for said in (
        f'{{"name": "l{escape}", "arguments": {{"at": 1}}}}',
        f'{{"arguments": {{"at": "{escape}"}}, "name": "look"}}',
    ):
        says(f"<tool_call>{said}</tool_call>")
        message = chat(server, tools=TOOLS, max_tokens=200).choices[0].message
        shown = [call.function.arguments for call in message.tool_calls or ()] or [message.content]
        assert shown == ['{"at": "\\ud83d"}' if "ud83d" in said and "look" in said else said]
        events = streamed_chat(server, tools=TOOLS, max_tokens=200)
        deltas = [event.choices[0].delta for event in events]
        pieces = [delta.content or "".join(c.function.arguments for c in delta.tool_calls or ()) for delta in deltas]
        assert ["".join(pieces)] == shown
