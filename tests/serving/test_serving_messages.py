"""Anthropic's API: chats in content blocks."""

import pytest

from token_recycling.serving import errors
from token_recycling.serving.api.messages import MessagesRequest

MESSAGES = [{"role": "user", "content": "import os"}]
ASKED = {"model": "tiny", "max_tokens": 12, "messages": MESSAGES, "temperature": 0}


def test_answer_names_its_stop_sequence(server):
    text = server.post("/v1/messages", ASKED).json()["content"][0]["text"]
    answer = server.post("/v1/messages", {**ASKED, "stop_sequences": ["never said", text[4:7]]}).json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", text[4:7])
    assert answer["content"][0]["text"] == text[: text.index(text[4:7])]


def test_count_tokens_equals_usage(server):
    body = {"messages": MESSAGES, "system": "Be brief."}
    counted = server.post("/v1/messages/count_tokens", body).json()["input_tokens"]
    usage = [server.post("/v1/messages", {**body, "max_tokens": 1}).json()["usage"] for _ in range(2)]
    assert [one["input_tokens"] + one["cache_read_input_tokens"] for one in usage] == [counted] * 2
    assert usage[1]["cache_read_input_tokens"] > 0


@pytest.mark.parametrize("end", [";", ";\n", ""])
@pytest.mark.parametrize("is_text", [False, True])
def test_billing_line_of_claude_code_does_not_prevent_caching(server, is_text, end):
    """Its checksum changes with every request; it is a block of its own, or the start of the text."""
    read, rest = [], f"\nimport os {end}{is_text}" * 20
    for checksum in ("fa690", "0aaa9"):
        line = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={checksum}{end}"
        system = line + rest if is_text else [{"type": "text", "text": text} for text in (line, rest)]
        usage = server.post("/v1/messages", {**ASKED, "system": system, "max_tokens": 1}).json()["usage"]
        read.append(usage["input_tokens"])
    assert read[0] > 50
    assert read[1] == 1
    (message, _) = MessagesRequest.model_validate({**ASKED, "system": system}).as_chat().messages
    assert message.content == (rest.lstrip() if is_text else rest)


def test_claude_code_request_becomes_a_chat():
    """Hints, system blocks, calls with their results, and server-side tools."""
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
    thoughts = [message.model_extra.get("reasoning_content") for message in body.messages]
    assert thoughts == [None, None, "well", None, None]
    assert body.messages[3].model_extra["tool_call_id"] == "t1"
    (tool,) = body.shown_tools
    assert tool["function"]["name"] == "Bash"
    assert (body.constrained_by, body.max_tokens) == ("parallel_tool_calls", 12)


def test_prefilled_answer_is_continued_unless_it_is_empty():
    for text, roles in (("import sys", ["user", "assistant"]), ("", ["user"])):
        body = {**ASKED, "messages": [*MESSAGES, {"role": "assistant", "content": text}]}
        chat = MessagesRequest.model_validate(body).as_chat()
        assert [message.role for message in chat.messages] == roles
        assert bool(chat.continue_final_message) == bool(text)


@pytest.mark.parametrize(
    ("choice", "mode"),
    [({"type": "any"}, "required"), ({"type": "tool", "name": "a"}, "named"), ({"type": "none"}, "none")],
)
def test_tool_choice_of_anthropic(choice, mode):
    body = {**ASKED, "tools": [{"name": "a", "input_schema": {}}], "tool_choice": choice}
    assert MessagesRequest.model_validate(body).as_chat().tool_mode == mode


def test_tool_fields_without_chat_equivalent_are_ignored_with_a_warning(caplog, monkeypatch):
    monkeypatch.setattr(errors.warn_ignored, "_subjects", set())
    used = {"type": "tool_use", "id": "t1", "name": "a", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "no such file", "is_error": True}
    tool = {"name": "a", "input_schema": {}, "input_examples": [{"at": 1}], "defer_loading": True, "type": "custom"}
    messages = [*MESSAGES, {"role": "assistant", "content": [used]}, {"role": "user", "content": [failed]}]
    body = MessagesRequest.model_validate({**ASKED, "messages": messages, "tools": [tool]})
    (shown,) = body.as_chat().shown_tools
    assert shown["function"] == {"name": "a", "parameters": {}, "input_examples": [{"at": 1}]}
    assert sorted(record.args[0] for record in caplog.records) == ["defer_loading", "is_error"]


def test_output_config_sets_the_schema():
    schema = {"type": "object", "properties": {"at": {"type": "integer"}}}
    body = {**ASKED, "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    assert MessagesRequest.model_validate(body).as_chat().constraint == (
        "output_config.format",
        ("json_schema", schema, False),
    )
