"""Prompted tools, for templates that show no tools and models whose format of calls is unknown."""

import json
import types

import pytest
from support import tiny
from support.functions import ASKED, HELD, SAID, TOOLS
from support.openai_answers import chat, streamed_chat
from support.speaking import TEMPLATE

from token_recycling.model.loading import Loaded
from token_recycling.serving.prompt import needs_prompted_tools, render_prompt, why_prompted_tools, with_prompted_tools
from token_recycling.serving.protocol import ChatRequest

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
    """Return the prompt of a chat whose template shows no tools."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    body = ChatRequest.model_validate({"messages": messages, **more})
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="llama")), tokenizer)
    assert needs_prompted_tools(loaded, body)
    return tokenizer.decode(
        render_prompt(tokenizer, with_prompted_tools(tokenizer, body.messages, body.shown_tools))[0]
    )


def test_reasons_for_prompted_tools(tokenizer, monkeypatch):
    loaded = Loaded(types.SimpleNamespace(config=types.SimpleNamespace(model_type="llama")), tokenizer)
    assert why_prompted_tools(loaded) is None
    monkeypatch.setattr(tokenizer, "response_template", None)
    assert why_prompted_tools(loaded) == "this model's format of calls is unknown"
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    assert why_prompted_tools(loaded) == "the chat template shows no tools"


def test_functions_are_listed_in_a_system_message():
    listed = json.dumps(TOOLS[0]["function"])
    shown = prompt_of(TEMPLATE, ASKED, tools=TOOLS)
    assert shown.startswith("system: You can call functions.")
    assert listed in shown
    assert shown.endswith("user: a\nassistant: ")
    for role in ("system", "developer"):
        own = prompt_of(TEMPLATE, [{"role": role, "content": "Be brief."}, *ASKED], tools=TOOLS)
        assert own.startswith("system: Be brief.\n\nYou can call functions.")
        assert own.count("system: ") == 1


def test_without_system_messages_functions_are_listed_before_the_question():
    shown = prompt_of(NO_SYSTEM, ASKED, tools=TOOLS)
    assert shown.startswith("user: You can call functions.")
    assert shown.endswith("without a call.\n\na\nassistant: ")


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_calls_and_results_become_messages(more):
    """Two results and the next question form one message, since many templates refuse consecutive user messages."""
    assert prompt_of(TEMPLATE, USED, **more) == (
        "user: where?\nassistant: Let me see.\n"
        '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {"at": 2}}\n</tool_call>\n'
        "user: <tool_response>\nhere\n</tool_response>\n<tool_response>\nthere\n</tool_response>\nand?\nassistant: "
    )
    bare = [USED[0], {**USED[1], "content": None}, *USED[2:]]
    assert prompt_of(TEMPLATE, bare, **more) == prompt_of(TEMPLATE, USED, **more).replace("Let me see.\n", "")


@pytest.fixture
def prompted_tools(request, monkeypatch, tokenizer):
    """The template shows no tools, or the model's format of calls is unknown, or both."""
    if request.param != "unknown format":
        monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    if request.param != "not shown":
        monkeypatch.setattr(tokenizer, "response_template", None)


@pytest.mark.parametrize("prompted_tools", ["unknown format", "not shown", "both"], indirect=True)
@pytest.mark.usefixtures("prompted_tools")
def test_prompted_calls_are_parsed(server, says):
    says(SAID)
    choice = chat(server, tools=TOOLS, max_tokens=300).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": 1})
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    events = streamed_chat(server, tools=TOOLS, max_tokens=300)
    streamed = [call.function for event in events for call in event.choices[0].delta.tool_calls or []]
    assert "".join(part.arguments for part in streamed) == call.function.arguments


@pytest.mark.parametrize("prompted_tools", ["unknown format", "both"], indirect=True)
@pytest.mark.usefixtures("prompted_tools")
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
@pytest.mark.parametrize("several", [True, False])
def test_required_prompted_call_is_the_whole_output(server, choice, several):
    how = {"tools": HELD, "tool_choice": choice, "parallel_tool_calls": several, "temperature": 0, "max_tokens": 300}
    said = chat(server, **how).choices[0]
    call, *more = said.message.tool_calls
    assert (said.message.content, said.finish_reason) == (None, "tool_calls")
    assert several or not more
    assert call.function.name in ({"go"} if choice != "required" else {"look", "go"})
    assert json.loads(call.function.arguments)["at"] in (1, 2)
