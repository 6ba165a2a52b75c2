"""Structured outputs."""

import asyncio
import collections
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.functions import HELD
from support.openai_answers import chat, completion, streamed_chat
from support.serving import keys, serving, wait_for

from token_recycling.model.loading import Loaded
from token_recycling.serving import grammars
from token_recycling.serving.errors import CancelledError
from token_recycling.serving.prompt import parts_constraint
from token_recycling.serving.protocol import ChatRequest


def test_slow_compilation_blocks_neither_free_text_nor_other_keys(model, tokenizer, monkeypatch):
    running, release = collections.Counter(), threading.Event()

    def compiling(self, form, gone):
        if form[1] == "[a-c]{3}":
            return usual(self, form, gone)
        running[form[1][0]] += 1
        release.wait(120)
        raise ValueError("too large")

    usual = grammars.Grammars._compiled
    monkeypatch.setattr(grammars.Grammars, "_compiled", compiling)
    with serving(model, tokenizer, keys=keys("a", "b")) as server, ThreadPoolExecutor(24) as pool:
        try:

            def ask(key, pattern):
                form = {"prompt": "a", "structured_outputs": {"regex": pattern}}
                return server.post("/v1/completions", form, f"secret-{key}")

            asking = [pool.submit(ask, "a", f"a{number}") for number in range(20)]
            wait_for(lambda: server.engine.running == 20 and running["a"] == 2)
            assert server.complete("secret-a", temperature=0).usage.completion_tokens == 8
            assert ask("b", "[a-c]{3}").status_code == 200
        finally:
            release.set()
        assert {one.result().status_code for one in asking} == {400}


def test_compilation_is_skipped_for_a_disconnected_client(model, tokenizer):
    compiling = grammars.Grammars(Loaded(model, tokenizer))
    with pytest.raises(CancelledError):
        asyncio.run(compiling.grammar("response_format", ("regex", "a", True), "", gone=lambda: True))
    compiling.close()


SCHEMA = {"type": "object", "properties": {"at": {"enum": ["here", "there"]}}, "required": ["at"]}
LOOSE = {**SCHEMA, "properties": {"at": {**SCHEMA["properties"]["at"], "format": "place"}}}
"""With a keyword that strict schemas must not have."""
FORMS = [
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": SCHEMA}},
]


SAME = [
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, {"response_format": FORMS[1]}),
    ({"structured_outputs": {"json": LOOSE}}, {"response_format": {"type": "json_object", "schema": LOOSE}}),
    ({"structured_outputs": {"grammar": 'root ::= "x" [yz]'}}, {"structured_outputs": {"regex": "x[yz]"}}),
    ({"structured_outputs": {"json_object": True}, "response_format": {"type": "text"}}, {"response_format": FORMS[0]}),
    ({"structured_outputs": {"choice": ['a "b"', "\\é😀"]}}, {"structured_outputs": {"regex": r'a "b"|\\é😀'}}),
]


@pytest.mark.parametrize(("asked", "same"), SAME)
def test_equivalent_constraints_have_equal_outputs(server, asked, same):
    texts = [completion(server, max_tokens=60, seed=3, **body).choices[0].text for body in (asked, same, {})]
    assert texts[0] == texts[1] != texts[2]
    choices = asked["structured_outputs"].get("choice")
    assert choices is None or texts[0] in choices


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_answers_satisfy_their_constraint(server, temperature):
    for seed in range(3):
        how = {"temperature": temperature, "seed": seed, "max_tokens": 60}
        said = completion(server, structured_outputs={"regex": "[a-c]{7}x"}, **how).choices[0]
        assert len(said.text) == 8
        assert (set(said.text[:7]) <= set("abc"), said.text[7], said.finish_reason) == (True, "x", "stop")
        placed = chat(server, response_format=FORMS[1], **how).choices[0].message
        assert json.loads(placed.content)["at"] in ("here", "there")
    begun = completion(server, response_format=FORMS[0], **how).choices[0].text
    assert begun[0] == "{"


@pytest.mark.parametrize("stated", [None, True, False])
def test_parallel_calls_are_allowed_by_default(server, stated):
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": HELD, "tool_choice": "required"}
    body = ChatRequest.model_validate({**asked, "parallel_tool_calls": stated})
    constraint = parts_constraint(server.engine.loaded, body, torch.tensor([[5]]))
    assert constraint.form.definition.parallel == (stated is not False)
    strict = {"type": "function", "function": {**HELD[0]["function"], "strict": True}}
    one = ChatRequest.model_validate({**asked, "tools": [strict, *HELD], "tool_choice": "auto"})
    assert one.constrained_by == "tools", "one strict tool is enough"


def test_forced_call_uses_the_delimiters_of_the_model(server):
    choice = {"type": "function", "function": {"name": "go"}}
    said = chat(server, tools=HELD, tool_choice=choice, temperature=0, max_tokens=200).choices[0]
    (call,) = said.message.tool_calls
    assert (call.function.name, said.finish_reason) == ("go", "tool_calls")
    assert json.loads(call.function.arguments)["at"] in (1, 2)


@pytest.mark.parametrize("strict", [False, True])
def test_output_with_tools_and_schema_is_a_call_or_satisfies_the_schema(server, strict):
    """Agents send both; the schema alone would forbid every call."""
    tools = [{"type": "function", "function": {**HELD[0]["function"], "strict": strict}}]
    kinds = set()
    for seed in range(6):
        how = {"tools": tools, "response_format": FORMS[1], "temperature": 5.0, "seed": seed, "max_tokens": 300}
        said = chat(server, **how).choices[0]
        kinds.add(said.finish_reason)
        if said.finish_reason == "tool_calls":
            assert said.message.content is None
            assert {json.loads(call.function.arguments)["at"] for call in said.message.tool_calls} <= {1, 2}
        elif said.finish_reason == "stop":
            assert json.loads(said.message.content)["at"] in ("here", "there")
    assert kinds >= {"tool_calls", "stop"}
    required = chat(server, tools=tools, response_format=FORMS[1], tool_choice="required", max_tokens=300).choices[0]
    assert required.finish_reason == "tool_calls"


@pytest.mark.parametrize("tools", [None, HELD])
def test_constraint_applies_after_reasoning_begun_by_the_prompt(server, says, tokenizer, monkeypatch, tools):
    """Otherwise the whole output would be parsed as reasoning."""
    monkeypatch.setattr(
        tokenizer, "chat_template", tokenizer.chat_template.replace("assistant: ", "assistant: <think>")
    )
    says('well</think>\n\n{"at":"here"}')
    message = chat(server, tools=tools, response_format=FORMS[1], max_tokens=60).choices[0].message
    assert (message.content.strip(), message.model_extra["reasoning_content"]) == ('{"at":"here"}', "well")


@pytest.mark.parametrize("line_ends", range(3))
def test_choice_after_reasoning_is_the_whole_content(server, says, tokenizer, monkeypatch, line_ends):
    """Line ends between reasoning and text are not content."""
    template = tokenizer.chat_template.replace("assistant: ", "assistant: <think>")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    says("well</think>" + "\n" * line_ends + "here")
    asked = {"structured_outputs": {"choice": ["here", "there"]}, "max_tokens": 60}
    message = chat(server, **asked).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("here", "well")
    assert "".join(event.choices[0].delta.content or "" for event in streamed_chat(server, **asked)) == "here"


def test_delimiters_in_formatted_text_are_text(server, says):
    said = '{"at": "<think>a</think><tool_call>b</tool_call>"}'
    schema = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
    says(said)
    form = {"type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": schema}}
    message = chat(server, response_format=form, max_tokens=100).choices[0].message
    assert (message.content, message.model_extra) == (said, {})


def test_reasoning_precedes_a_format_only_if_it_is_separated(server, tokenizer, monkeypatch):
    """Otherwise it would be part of the formatted text."""
    asked = {"messages": [{"role": "user", "content": "a"}], "tools": HELD, "response_format": FORMS[1]}
    body, prompt = ChatRequest.model_validate(asked), tokenizer("<think>\n", return_tensors="pt")["input_ids"]
    for template, thinking in ((tokenizer.response_template, "begun"), (None, "none")):
        monkeypatch.setattr(tokenizer, "response_template", template)
        constraint = parts_constraint(server.engine.loaded, body, prompt, prompted=template is None)
        assert constraint.form.definition.thinking == thinking


def test_constrained_output_is_the_same_with_and_without_drafts(server, model, tokenizer):
    form = {"structured_outputs": {"regex": "(ab|cd|ef){6,20}"}}
    body = {"prompt": "for index in", **form, "temperature": 0, "max_tokens": 60}
    drafted = completion(server, **body)
    assert drafted.usage.model_extra["speculation"]["accepted_tokens"] > 0
    with serving(model, tokenizer, drafter="plain") as plain:
        assert completion(plain, **body).choices[0].text == drafted.choices[0].text
