"""Tool calls, reasoning and answers of a given form."""

import asyncio
import importlib.util
import json
import types

import pytest
import torch
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support import tiny
from support.openai_answers import chat, completion, streamed_chat
from support.serving import serving
from support.speaking import TEMPLATE, speaking_llama
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from token_recycling.model.loading import Loaded
from token_recycling.serving import grammars
from token_recycling.serving import service as services
from token_recycling.serving.choices import Choice
from token_recycling.serving.requests import ChatBody
from token_recycling.serving.responses import ResponsesBody
from token_recycling.serving.settings import Isolation
from token_recycling.serving.templates import rendered, response_parser
from token_recycling.serving.tools import in_words, told, why_in_words

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
WITH_TOOLS = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}" + TEMPLATE
RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}
SAID = 'Let me see.<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


class Scripted(LogitsProcessor):
    """Lets a model say what a test wants."""

    def __init__(self, tokens, prompt_tokens):
        self.tokens, self.prompt_tokens = tokens, prompt_tokens

    def __call__(self, input_ids, scores):
        forced = scores.new_full(scores.shape, float("-inf"))
        forced[0, self.tokens[input_ids.shape[1] - self.prompt_tokens]] = 0
        return forced


@pytest.fixture(scope="module")
def model():
    made = speaking_llama()
    made.generation_config.eos_token_id = 0
    return made


@pytest.fixture(scope="module")
def tokenizer():
    made = tiny.tokenizer()
    made.chat_template, made.response_template = WITH_TOOLS, RESPONSES
    return made


@pytest.fixture(scope="module")
def server(model, tokenizer):
    with serving(model, tokenizer) as running:
        yield running


@pytest.fixture
def says(monkeypatch, tokenizer):
    """Makes the model say a text."""
    usual = services.processors_of

    def script(text):
        tokens = [*tokenizer(text)["input_ids"], 0]

        def scripted(body, config, prompt_tokens, *more):
            found = usual(body, config, prompt_tokens, *more)
            return type(found)([*found, Scripted(tokens, prompt_tokens)])

        monkeypatch.setattr(services, "processors_of", scripted)

    return script


def test_a_call_is_told_as_such(server, says):
    says(SAID)
    choice = chat(server, tools=TOOLS, max_tokens=200).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 1})
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")


def test_a_call_is_streamed(server, says):
    says(SAID * 2)
    events = streamed_chat(server, tools=TOOLS, max_tokens=200)
    calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    assert [(call.index, call.function.name) for call in calls] == [(0, "look"), (1, "look")]
    assert len({call.id for call in calls}) == 2
    assert events[-1].choices[0].finish_reason == "tool_calls"


def test_reasoning_is_no_part_of_the_text(server, says):
    says("<think>well</think>done")
    message = chat(server, max_tokens=99).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("done", "well")
    deltas = [event.choices[0].delta for event in streamed_chat(server, max_tokens=99)]
    assert "".join(delta.content or "" for delta in deltas) == "done"
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "well"


FLAT = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]


def test_responses_have_items_of_each_kind(server, says):
    """Streamed or not; the official client puts the events together."""
    says(f"<think>well</think>{SAID}")
    asked = {"model": "tiny", "input": "a", "tools": FLAT}
    with server.client().responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for answer in (server.client().responses.create(**asked), streamed):
        thought, message, call = answer.output
        assert (thought.type, thought.content[0].text) == ("reasoning", "well")
        assert (message.type, answer.output_text) == ("message", "Let me see.")
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "look", {"at": 1})
        assert answer.status == "completed"
    read = [TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump(warnings=False)).type for event in events]
    assert read[-1] == "response.completed"
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in ended] == [item.id for item in streamed.output]


def test_a_conversation_with_calls_is_the_same_chat(tokenizer, monkeypatch):
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "where?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "one", "name": "look", "arguments": '{"at": 1}'},
        {"type": "function_call", "call_id": "two", "name": "look", "arguments": '{"at": 2}'},
        {"type": "function_call_output", "call_id": "one", "output": "here"},
    ]
    body = ResponsesBody(input=items, instructions="Be brief.", tools=FLAT, tool_choice="auto").as_chat()
    assert body.tools == TOOLS
    shown = "{% for m in messages %}{{ m.role }}|{{ m.content }}|{{ m.tool_call_id }}|{% for c in m.tool_calls or [] %}"
    shown += "{{ c.id }}={{ c.function.arguments.at }} {% endfor %}{{ '\\n' }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", shown)
    text = tokenizer.decode(rendered(tokenizer, body.messages)[0])
    said = ["system|Be brief.||", "user|where?||", "assistant|Let me see.||one=1 two=2 ", "tool|here|one|"]
    assert text.splitlines() == said


WRITTEN = {
    "qwen3": '<think>\nwell\n</think>\n\nyes\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    "<|im_end|>",
    "qwen3_5": "<think>\nwell\n</think>\n\nyes\n<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n<|endoftext|>",
    "gemma4": "<|channel>thought\nwell<channel|>yes<|tool_call>call:look{at:1}<tool_call|><turn|>",
}


@pytest.mark.parametrize("family", WRITTEN)
def test_what_families_write_is_known(model, family):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "<function=" if family == "qwen3_5" else "<tool_call>"
    config = types.SimpleNamespace(model_type=family)
    loaded = Loaded(types.SimpleNamespace(config=config), tokenizer)
    choice = Choice(
        tokenizer, model.generation_config, lambda: response_parser(loaded, torch.empty(1, 0, dtype=torch.long), None)
    )
    delta = choice._fed(WRITTEN[family]) + choice.end()
    assert (delta.reasoning.strip(), delta.text.strip()) == ("well", "yes")
    ((name, arguments),) = delta.calls
    assert (name, int(json.loads(arguments)["at"])) == ("look", 1)
    config.model_type = "llama"
    assert response_parser(loaded, torch.empty(1, 0, dtype=torch.long), None) is None


def test_no_tools_are_shown_where_none_may_be_used(server):
    shown = chat(server, tools=TOOLS, max_tokens=1).usage.prompt_tokens
    hidden = chat(server, tools=TOOLS, tool_choice="none", max_tokens=1).usage.prompt_tokens
    assert shown > hidden == chat(server, max_tokens=1).usage.prompt_tokens


def test_with_an_old_release_of_transformers_tools_are_refused(server, monkeypatch):
    monkeypatch.delattr(PreTrainedTokenizerBase, "get_response_parser")
    for path, asked in (
        ("chat/completions", {"messages": ASKED, "tools": TOOLS}),
        ("responses", {"input": "a", "tools": FLAT}),
    ):
        answer = server.post(f"/v1/{path}", asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
        assert "transformers 5.13 or newer" in answer.json()["error"]["message"]


# Functions in words

ASKED = [{"role": "user", "content": "a"}]
USED = [
    {"role": "user", "content": "where?"},
    {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": str(at), "type": "function", "function": {"name": "look", "arguments": json.dumps({"at": at})}}
            for at in (1, 2)
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "here"},
    {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "there"}]},
    {"role": "user", "content": "and?"},
]
NO_SYSTEM = "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system') }}{% endfor %}" + TEMPLATE


def prompt_of(template, messages, **more):
    """What a model is shown of a chat whose template shows no tools."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    body = ChatBody.model_validate({"messages": messages, **more})
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="llama")), tokenizer)
    assert in_words(loaded, body)
    return tokenizer.decode(rendered(tokenizer, told(tokenizer, body.messages, body.shown_tools))[0])


def test_why_tools_are_told_in_words(tokenizer, monkeypatch):
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="llama")), tokenizer)
    assert why_in_words(loaded) is None
    monkeypatch.setattr(tokenizer, "response_template", None)
    assert why_in_words(loaded) == "how this model writes calls is not known"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    assert why_in_words(loaded) == "the chat template shows none"


def test_functions_are_listed_in_a_system_message():
    listed = json.dumps(TOOLS[0]["function"])
    shown = prompt_of(TEMPLATE, ASKED, tools=TOOLS)
    assert shown.startswith("system: You can call functions.")
    assert listed in shown
    assert shown.endswith("user: a\nassistant: ")
    own = prompt_of(TEMPLATE, [{"role": "system", "content": "Be brief."}, *ASKED], tools=TOOLS)
    assert own.startswith("system: Be brief.\n\nYou can call functions.")
    assert own.count("system: ") == 1


def test_without_system_messages_functions_are_listed_before_the_question():
    shown = prompt_of(NO_SYSTEM, ASKED, tools=TOOLS)
    assert shown.startswith("user: You can call functions.")
    assert shown.endswith("without a call.\n\na\nassistant: ")


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_and_results_become_messages(more):
    """Two results and the question behind them are one message, since many templates refuse two of a user in a row."""
    assert prompt_of(TEMPLATE, USED, **more) == (
        "user: where?\nassistant: Let me see.\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call>\n'
        "user: <tool_response>\nhere\n</tool_response>\n<tool_response>\nthere\n</tool_response>\nand?\nassistant: "
    )


@pytest.mark.parametrize("calls", [5, [{}], [{"function": {"name": "a", "arguments": "[1"}}], [{"name": "a"}]])
def test_calls_of_messages_that_are_none(server, calls):
    answer = server.post(
        "/v1/chat/completions", {"messages": [*ASKED, {"role": "assistant", "tool_calls": calls}], "max_tokens": 1}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert "expected tool_calls with the name of a function" in answer.json()["error"]["message"]


@pytest.mark.parametrize("tool", [{}, {"function": {"name": 'a"b'}}, {"function": {"name": "a", "parameters": [1]}}])
def test_tools_that_are_no_functions(server, tool):
    answer = server.post("/v1/chat/completions", {"messages": ASKED, "tools": [tool], "max_tokens": 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


@pytest.fixture
def in_words_alone(request, monkeypatch, tokenizer):
    """The template shows no tools, or nobody knows how the model calls them, or both."""
    if request.param != "unread":
        monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    if request.param != "not shown":
        monkeypatch.setattr(tokenizer, "response_template", None)


@pytest.mark.parametrize("in_words_alone", ["unread", "not shown", "both"], indirect=True)
@pytest.mark.usefixtures("in_words_alone")
def test_what_is_called_in_words_is_read(server, says):
    says("Let me see.\n" + "<tool_call>\n" + json.dumps({"name": "look", "arguments": {"at": 1}}) + "\n</tool_call>")
    choice = chat(server, tools=TOOLS, max_tokens=300).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 1})
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    events = streamed_chat(server, tools=TOOLS, max_tokens=300)
    (streamed,) = [call for event in events for call in event.choices[0].delta.tool_calls or []]
    assert (streamed.index, streamed.function.model_dump()) == (0, call.function.model_dump())
    assert "".join(event.choices[0].delta.content or "" for event in events) == "Let me see."


@pytest.mark.parametrize("written", ["{'at'", "[]", '{"name": "look"}', '{"name": "look", "arguments": [1]}'])
@pytest.mark.parametrize("ended", [True, False])
def test_what_is_no_call_is_text(server, says, written, ended):
    """Where the model writes something else between the marks, or the text ends within them."""
    says(f"Well.<tool_call>{written}{'</tool_call>' * ended}")
    choice = chat(server, tools=TOOLS, max_tokens=200).choices[0]
    assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")
    assert choice.message.content == f"Well.{written}"


def test_an_unfinished_call_behind_a_call_is_left_out(server, says):
    says(f"{SAID}<tool_call>{{")
    message = chat(server, tools=TOOLS, max_tokens=200).choices[0].message
    assert (message.content, len(message.tool_calls)) == ("Let me see.", 1)


@pytest.mark.parametrize("in_words_alone", ["unread", "both"], indirect=True)
@pytest.mark.usefixtures("in_words_alone")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
@pytest.mark.parametrize("several", [True, False])
def test_calls_alone_must_be_made_in_words(server, choice, several):
    pytest.importorskip("xgrammar")
    how = {"tools": HELD, "tool_choice": choice, "parallel_tool_calls": several, "temperature": 0, "max_tokens": 300}
    said = chat(server, **how).choices[0]
    call, *more = said.message.tool_calls
    assert (said.message.content, said.finish_reason) == (None, "tool_calls")
    assert several or not more
    assert call.function.name in ({"go"} if choice != "required" else {"look", "go"})
    assert json.loads(call.function.arguments)["at"] in (1, 2)


# Answers of a given form


def compiled_by(monkeypatch, size):
    """Forms as they are compiled from now on, in a list; each takes so many bytes."""
    compiled, grammar = [], types.SimpleNamespace(memory_size_bytes=size)

    async def compiling(self, form, gone):
        compiled.append(form[1])
        return ""

    monkeypatch.setattr(grammars, "lacking", lambda *args: "")
    monkeypatch.setattr(grammars.CompilingProcess, "compiled", compiling)
    monkeypatch.setattr(grammars.Grammars, "_read", lambda self, written: grammar)
    return compiled


@pytest.mark.parametrize("isolation", Isolation)
def test_what_is_compiled_is_shared_as_drafters_are(model, tokenizer, monkeypatch, isolation):
    """What is compiled already takes no time, which would tell that somebody asked for it."""
    compiled = compiled_by(monkeypatch, 1)
    found = grammars.Grammars(Loaded(model, tokenizer), isolation, keys=2)
    for key in "aba":
        asyncio.run(found.processor("response_format", ("regex", f"of {key}", True), key))
    again = [] if isolation is not Isolation.per_request else ["of a"]
    assert compiled == ["of a", "of b", *again]
    asyncio.run(found.processor("response_format", ("regex", "of b", True), "a"))
    assert (compiled[-1:] == ["of b"] and len(compiled) > 2) == (isolation is not Isolation.shared)


def test_what_is_compiled_is_kept_up_to_a_size(model, tokenizer, monkeypatch):
    compiled = compiled_by(monkeypatch, 40_000_000)
    found = grammars.Grammars(Loaded(model, tokenizer), Isolation.shared, keys=1)
    for pattern in "abcac":
        asyncio.run(found.processor("response_format", ("regex", pattern, True)))
    assert compiled == [*"abca"]


SCHEMA = {"type": "object", "properties": {"at": {"enum": ["here", "there"]}}, "required": ["at"]}
FORMS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}},
    {"type": "regex", "value": "[a-c]{7}x"},
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["type"])
def test_without_the_extra_a_form_is_refused(server, monkeypatch, form):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = server.post("/v1/completions", {"prompt": "a", "response_format": form})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert "token-recycling[grammar]" in answer.json()["error"]["message"]


def test_without_the_extra_no_call_can_be_required(server, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "tool_choice": "required"}
    answer = server.post("/v1/chat/completions", chat)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert "token-recycling[grammar]" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "form",
    [{"type": "xml"}, {}, {"type": "json_schema"}, {"type": "regex"}, {"type": "json_schema", "json_schema": {}}],
)
def test_a_form_that_is_none(server, form):
    answer = server.post("/v1/completions", {"prompt": "a", "response_format": form})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


def test_text_needs_nothing(server):
    assert completion(server, response_format={"type": "text"}, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_have_the_form(server, temperature):
    pytest.importorskip("xgrammar")
    for seed in range(3):
        how = {"temperature": temperature, "seed": seed, "max_tokens": 60}
        said = completion(server, response_format=FORMS[2], **how).choices[0]
        assert len(said.text) == 8
        assert (set(said.text[:7]) <= set("abc"), said.text[7], said.finish_reason) == (True, "x", "stop")
        placed = chat(server, response_format=FORMS[1], **how).choices[0].message
        assert json.loads(placed.content)["at"] in ("here", "there")
    begun = completion(server, response_format=FORMS[0], **how).choices[0].text
    assert begun[0] == "{"


PARAMETERS = {"type": "object", "properties": {"at": {"enum": [1, 2]}}, "required": ["at"]}
HELD = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("look", "go")]


def test_a_call_must_be_made_in_the_marks_of_the_family(server):
    pytest.importorskip("xgrammar")
    choice = {"type": "function", "function": {"name": "go"}}
    said = chat(server, tools=HELD, tool_choice=choice, temperature=0, max_tokens=200).choices[0]
    (call,) = said.message.tool_calls
    assert (call.function.name, said.finish_reason) == ("go", "tool_calls")
    assert json.loads(call.function.arguments)["at"] in (1, 2)


def test_strict_functions_are_held_to_when_they_are_called(server):
    pytest.importorskip("xgrammar")
    strict = [{"type": "function", "function": {**HELD[0]["function"], "strict": True}}]
    assert chat(server, tools=strict, max_tokens=5).usage.completion_tokens == 5
    wrong = [{"type": "function", "function": {"name": "a", "strict": True, "parameters": {"uniqueItems": True}}}]
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": wrong})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert (
        "a: expected keywords of JSON Schema that can be held to, got uniqueItems" in answer.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}, "tools": HELD}, "tool_choice"),
        ({"tool_choice": "required", "tools": HELD, "response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_calls_that_cannot_be_held_to(server, more, param):
    pytest.importorskip("xgrammar")
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"$ref": "https://example.com/schema.json"}, "$ref to https://example.com/schema.json"),
    ],
)
def test_what_a_schema_cannot_be_held_to_is_named(server, schema, named):
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = server.post("/v1/completions", {"prompt": "a", "response_format": form})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
    assert f"got {named}" in answer.json()["error"]["message"]


def test_a_form_with_drafts_is_that_without(server, model, tokenizer):
    pytest.importorskip("xgrammar")
    form = {"type": "regex", "value": "(ab|cd|ef){6,20}"}
    body = {"prompt": "for index in", "response_format": form, "temperature": 0, "max_tokens": 60}
    drafted = completion(server, **body)
    assert drafted.usage.model_extra["speculation"]["accepted_tokens"] > 0
    with serving(model, tokenizer, drafter="plain") as plain:
        assert completion(plain, **body).choices[0].text == drafted.choices[0].text


def test_a_form_that_cannot_be_compiled(server):
    pytest.importorskip("xgrammar")
    answer = server.post("/v1/completions", {"prompt": "a", "response_format": {"type": "regex", "value": "(["}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")
