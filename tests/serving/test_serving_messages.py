"""Anthropic's API: the same chat, in content blocks."""

import json

import pytest
from support.openai_answers import chat

from token_recycling.serving.messages import MessagesRequest

MESSAGES = [{"role": "user", "content": "import os"}]
ASKED = {"model": "tiny", "max_tokens": 12, "messages": MESSAGES, "temperature": 0}


def events(server, **body):
    answer = server.post("/v1/messages", {**ASKED, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    named = [event.split("\n", 1) for event in answer.text.split("\n\n") if event]
    read = [json.loads(data.removeprefix("data: ")) for _, data in named]
    assert [name.removeprefix("event: ") for name, _ in named] == [event["type"] for event in read]
    return read


def test_a_message_is_the_text_of_the_chat_whole_and_streamed(server):
    answer = server.post("/v1/messages", ASKED).json()
    same = chat(server, temperature=0, max_tokens=12)
    text = same.choices[0].message.content
    assert answer["content"] == [{"type": "text", "text": text}]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same.usage.prompt_tokens
    assert usage["output_tokens"] == 12
    blocks = [{"type": "text", "text": part, "cache_control": {"type": "ephemeral"}} for part in ("import ", "os")]
    parts = {**ASKED, "messages": [{"role": "user", "content": blocks}]}
    assert server.post("/v1/messages", parts).json()["content"] == answer["content"]

    first, *rest = events(server)
    assert (first["type"], first["message"]["content"]) == ("message_start", [])
    deltas = [event for event in rest if event["type"] == "content_block_delta"]
    assert "".join(event["delta"]["text"] for event in deltas) == text
    kinds = [event["type"] for event in rest if event not in deltas]
    assert kinds == ["content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert rest[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert rest[-2]["usage"]["output_tokens"] == 12


def test_a_stop_sequence_is_named(server):
    text = server.post("/v1/messages", ASKED).json()["content"][0]["text"]
    answer = server.post("/v1/messages", {**ASKED, "stop_sequences": ["never said", text[4:7]]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[4:7])
    assert answer["content"][0]["text"] == text[: text.index(text[4:7])]


def test_tokens_are_counted_as_they_are_read(server):
    body = {"messages": MESSAGES, "system": "Be brief."}
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    usage = server.post("/v1/messages", {**body, "max_tokens": 1}).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_what_claude_code_sends_is_a_chat():
    """Hints, system blocks, calls with their results, and tools that Anthropic runs."""
    called = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}}
    thought = {"type": "thinking", "thinking": "well", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "README.md"}]}
    asked = {
        **ASKED,
        "system": [
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "\nBe brief."},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "list files"}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "Let me see."}, called]},
            {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        ],
        "tools": [
            {"name": "Bash", "description": "Runs it.", "input_schema": {"type": "object", "properties": {}}},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        ],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "betas": ["x"],
    }
    body = MessagesRequest.model_validate(asked).as_chat()
    said = [(message.role, message.content) for message in body.messages]
    assert said == [
        ("system", "You are Claude Code.\nBe brief."),
        ("user", "list files"),
        ("assistant", "Let me see."),
        ("tool", "README.md"),
        ("user", "and?"),
    ]
    assert body.messages[2].tool_calls[0].function.arguments == {"command": "ls"}
    assert body.messages[3].model_extra["tool_call_id"] == "t1"
    (tool,) = body.shown_tools
    assert tool["function"]["name"] == "Bash"
    assert (body.constrained_by, body.max_tokens) == ("parallel_tool_calls", 12)


@pytest.mark.parametrize(
    ("choice", "mode"),
    [({"type": "any"}, "required"), ({"type": "tool", "name": "a"}, "named"), ({"type": "none"}, "none")],
)
def test_tools_are_chosen_as_anthropic_defines_it(choice, mode):
    body = {**ASKED, "tools": [{"name": "a", "input_schema": {}}], "tool_choice": choice}
    assert MessagesRequest.model_validate(body).as_chat().tool_mode == mode


def test_a_schema_may_be_asked_for():
    schema = {"type": "object", "properties": {"at": {"type": "integer"}}}
    body = {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    assert MessagesRequest.model_validate(body).as_chat().form == ("response_format", ("json_schema", schema, False))
