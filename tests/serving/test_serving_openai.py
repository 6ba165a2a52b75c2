"""Requests of the official OpenAI client and of agents."""

import time

import pytest
from openai.types.responses import Response
from support import tiny
from support.openai_answers import chat, completion
from support.serving import PROMPT, serving
from support.speaking import CONTEXT, OF_PARTS, TEMPLATE, chat_tokenizer

from token_recycling.model.target import Target
from token_recycling.serving.api import common
from token_recycling.serving.api.responses import ResponsesRequest
from token_recycling.serving.conversation import Message
from token_recycling.serving.prompt import render_prompt, template_message
from token_recycling.serving.protocol import ChatRequest

MESSAGES = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 24, **more})


@pytest.mark.parametrize("more", [{}, {"seed": -1}])  # vllm-project/vllm#4531
def test_outputs_without_a_seed_differ(client, more):
    for sampled in ({"temperature": 1.5}, {"top_p": 0.99}):
        assert len({complete(client, **sampled, **more).choices[0].text for _ in range(3)}) > 1


def test_unlimited_answer_ends_at_the_context_length(client, server):
    prompt = server.engine.loaded.tokenizer.decode([5]) * (CONTEXT - 40)
    for limit in (1000, -1):  # as in langchain-ai/langchain#10822
        answer = complete(client, prompt, max_tokens=limit)
        assert answer.usage.total_tokens == CONTEXT
        assert answer.choices[0].finish_reason == "length"


def test_model_aliases_are_listed_and_answered(model):
    with serving(model, tiny.tokenizer(), aliases=("two/three",)) as server:
        client = server.client()
        assert [one.id for one in client.models.list()] == ["tiny", "two/three"]
        assert client.models.retrieve("two/three").model_extra["max_model_len"] == CONTEXT
        assert client.completions.create(model="two/three", prompt="a", max_tokens=1).model == "tiny"


def test_idle_stream_sends_keep_alive_comments(model, tokenizer, monkeypatch):
    """They are sent while a prompt is read; the official client ignores them."""
    read = Target.read
    monkeypatch.setattr(common, "_PING", 0.02)
    with serving(model, tokenizer) as server:
        monkeypatch.setattr(Target, "read", lambda *given, **more: (time.sleep(0.2), read(*given, **more))[1])
        answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "stream": True})
    assert answer.text.startswith(": keep-alive\n\n")
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["cache-control"] == "no-cache"


def test_reasoning_effort_reaches_templates_that_read_it(server, model):
    assert (
        chat(server, temperature=0, max_tokens=24, reasoning_effort="high").choices
        == chat(server, temperature=0, max_tokens=24).choices
    )
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = "{{ reasoning_effort }}: " + TEMPLATE
    with serving(model, tokenizer) as other:
        answer = chat(
            other, temperature=0, max_tokens=24, reasoning_effort="low", messages=[{"role": "user", "content": "a"}]
        )
        wanted = completion(other, prompt="low: user: a\nassistant: ", temperature=0, max_tokens=24)
        assert answer.choices[0].message.content == wanted.choices[0].text
        assert answer.usage.prompt_tokens == wanted.usage.prompt_tokens
        again = chat(
            other, max_tokens=1, reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"},
            messages=[{"role": "user", "content": "a"}],
        )  # fmt: skip
        assert again.usage.prompt_tokens == wanted.usage.prompt_tokens, "template variables take precedence"


# Requests as agents send them


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([{"role": "developer", "content": "Be brief."}], "system: Be brief.\n"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "user: ab\n"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "assistant: No.\n"),
        ([{"role": "assistant", "content": None, "refusal": "No."}], "assistant: No.\n"),
        ([{"role": "assistant", "content": "Yes.", "refusal": None}], "assistant: Yes.\n"),
        ([{"role": "assistant", "content": "Yes.", "refusal": "No."}], "assistant: Yes.\n"),
    ],
)
def test_variants_of_messages_are_rendered(tokenizer, messages, shown):
    body = ChatRequest.model_validate({"messages": messages})
    assert tokenizer.decode(render_prompt(tokenizer, body.messages)[0]) == f"{shown}assistant: "


def rendered(template, *messages):
    """Return the text of a conversation without a generation prompt; `template` shows a message `m`."""
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = f"{{% for m in messages %}}{template}; {{% endfor %}}"
    body = ChatRequest.model_validate({"messages": [*messages]})
    return tokenizer.decode(render_prompt(tokenizer, body.messages)[0])


@pytest.mark.parametrize("sent", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_the_name_that_the_template_reads(sent):
    """The API's name is `reasoning_content`, vLLM's `reasoning`; gpt-oss's and LFM2.5's templates read `thinking`."""
    messages = [{"role": "assistant", "content": "a", sent: "well", "reasoning_content": None} | {sent: "well"}]
    for read in ("reasoning_content", "thinking", "reasoning", "reasoning or m.reasoning_content"):
        assert rendered(f"{{{{ m.{read} }}}}", *messages) == "well; "
    assert rendered("{{ m.thinking }}", {"role": "assistant", "content": "a", "thinking": True}) == "True; "


def test_empty_list_of_calls_is_left_out():
    """gpt-oss's template reads the first call, LFM2.5's shows brackets."""
    assert rendered("{{ m.tool_calls[0].x if 'tool_calls' in m else 'none' }}", {**SAID, "tool_calls": []}) == "none; "


def test_null_fields_of_functions_are_not_shown():
    schema = {"type": "object", "properties": {"a": {"type": "string", "default": None}}}
    function = {"name": "look", "description": None, "parameters": schema, "strict": None}
    body = ChatRequest(messages=[ASKED], tools=[{"type": "function", "function": function}])
    assert body.shown_tools == [{"type": "function", "function": {"name": "look", "parameters": schema}}]


def test_ids_of_calls_have_names_for_templates_that_show_only_ids():
    """As Kimi's templates do, whose models write `functions.NAME:NUMBER`."""
    calls = [{"id": name, "function": {"name": f"look-{name}", "arguments": "{}"}} for name in "ab"]
    messages = [ASKED, {**SAID, "tool_calls": calls}, *({"role": "tool", "tool_call_id": name} for name in "bac")]
    shown = "{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}"
    ids = "; functions.look-a:0 functions.look-b:1 ; functions.look-b:1; functions.look-a:0; c; "
    assert rendered(shown, *messages) == ids
    calls = [{"function": call["function"]} for call in calls]
    messages = [ASKED, {**SAID, "tool_calls": calls}, *[{"role": "tool", "content": "x"}] * 2, ASKED]
    ids = "; functions.look-a:0 functions.look-b:1 ; functions.look-a:0; functions.look-b:1; ; "
    assert rendered(shown, *messages) == ids


def test_ids_of_calls_are_unchanged_for_templates_that_show_names():
    calls = [{"id": name, "function": {"name": f"look-{name}", "arguments": "{}"}} for name in "ab"]
    messages = [ASKED, {**SAID, "tool_calls": calls}, *({"role": "tool", "tool_call_id": name} for name in "bac")]
    named = "{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id ~ c.function.name }} {% endfor %}"
    assert rendered(named, *messages) == "; alook-a blook-b ; b; a; c; "


def refusing(condition):
    """Return a template that refuses messages for which the condition holds."""
    refusal = f"{{% if {condition} %}}{{{{ raise_exception('refused') }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{refusal}{{% endfor %}}{TEMPLATE}"


SYSTEM_FIRST, NO_SYSTEM = refusing("m.role == 'system' and not loop.first"), refusing("m.role == 'system'")
IN_TURNS = refusing("(m.role == 'user') != (loop.index0 % 2 == 0)")


def showing(condition):
    """Return a template that ignores other messages than those for which the condition holds."""
    shown = f"{{% if {condition} %}}{{{{ m.role }}}}: {{{{ m.content }}}}\n{{% endif %}}"
    return f"{{% for m in messages %}}{shown}{{% endfor %}}assistant: "


NOT_SYSTEM = "m.role != 'system' or "
FIRST_SHOWN = showing(NOT_SYSTEM + "loop.first")
LAST_SHOWN = showing(NOT_SYSTEM + "messages[loop.index:] | selectattr('role', 'eq', 'system') | list == []")
SHOWN_BEFORE_A_USER = showing(NOT_SYSTEM + "loop.nextitem is defined and loop.nextitem.role == 'user'")
NONE_SHOWN = showing(NOT_SYSTEM + "false")
RULES, POLICY = {"role": "system", "content": "A"}, {"role": "developer", "content": [{"type": "text", "text": "B"}]}
ASKED, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("template", "messages", "shown"),
    [
        (SYSTEM_FIRST, [RULES, POLICY, ASKED], "system: A\n\nB\nuser: q\n"),  # BerriAI/litellm#26879
        (SYSTEM_FIRST, [ASKED, SAID, POLICY, ASKED], "system: B\nuser: q\nassistant: a\nuser: q\n"),  # #39282
        (NO_SYSTEM, [RULES, ASKED], "user: A\n\nq\n"),  # sgl-project/sglang#892
        (NO_SYSTEM, [RULES, SAID, ASKED], "user: A\nassistant: a\nuser: q\n"),
        (NO_SYSTEM, [RULES], "user: A\n"),
        (IN_TURNS, [ASKED, ASKED, SAID, SAID, ASKED], "user: q\n\nq\nassistant: a\n\na\nuser: q\n"),  # vllm#6862
        (IN_TURNS, [RULES, ASKED, SAID, ASKED], "user: A\n\nq\nassistant: a\nuser: q\n"),  # vllm#2080
        (IN_TURNS, [SAID, ASKED], "user: \nassistant: a\nuser: q\n"),
        (SYSTEM_FIRST + IN_TURNS.removesuffix(TEMPLATE), [RULES, SAID, ASKED], "user: A\nassistant: a\nuser: q\n"),
        (OF_PARTS, [RULES, ASKED, SAID, POLICY, ASKED], "system: A\nuser: q\nassistant: a\nsystem: B\nuser: q\n"),
        (IN_TURNS.replace(TEMPLATE, OF_PARTS), [RULES, ASKED], "user: A\n\nq\n"),
        # Templates that ignore system messages instead of refusing them, as some of chujiezheng/chat_templates
        (FIRST_SHOWN, [RULES, ASKED, SAID], "system: A\nuser: q\nassistant: a\n"),
        (FIRST_SHOWN, [ASKED, POLICY, ASKED], "system: B\nuser: q\n\nq\n"),
        (LAST_SHOWN, [RULES, ASKED, POLICY, ASKED], "system: A\n\nB\nuser: q\n\nq\n"),
        (SHOWN_BEFORE_A_USER, [RULES], "system: A\nuser: \n"),
        (SHOWN_BEFORE_A_USER, [ASKED, RULES, SAID, ASKED], "system: A\nuser: q\nassistant: a\nuser: q\n"),
        (NONE_SHOWN, [RULES, ASKED], "user: A\n\nq\n"),
    ],
)
def test_conversation_refused_or_ignored_by_the_template_is_merged_into_turns(template, messages, shown):
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    body = ChatRequest.model_validate({"messages": messages})
    assert tokenizer.decode(render_prompt(tokenizer, body.messages)[0]) == f"{shown}assistant: "


def test_ignored_system_messages_are_found_at_once(monkeypatch):
    """Not one by one, since clients choose their number."""
    tokenizer, rendered = chat_tokenizer(), []
    usual = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda *args, **more: (rendered.append(1), usual(*args, **more))[1]
    )
    counts = []
    for number in (5, 50):
        rendered.clear()
        body = ChatRequest.model_validate({"messages": [ASKED, RULES] * number})
        shown = tokenizer.decode(render_prompt(tokenizer, body.messages)[0])
        assert shown == "user: q\nsystem: A\n" * number + "assistant: "
        counts.append(len(rendered))
    assert 0 < counts[1] <= counts[0] < 10


def test_legacy_function_calls_become_tool_calls():
    called = {"name": "look", "arguments": '{"at": 1}'}
    messages = [
        {"role": "assistant", "content": None, "function_call": called},
        {"role": "function", "name": "look", "content": "nothing"},
        {"role": "assistant", "content": "well", "function_call": None},
    ]
    call, result, said = ChatRequest.model_validate({"messages": messages}).messages
    (written,) = call.tool_calls
    assert (written.function.name, written.function.arguments) == ("look", {"at": 1})
    assert (result.role, result.content, result.name) == ("tool", "nothing", "look")
    assert (said.tool_calls, said.content) == (None, "well")


LOOK, GO = ({"type": "function", "function": {"name": name}} for name in ("look", "go"))
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [GO]}}


@pytest.mark.parametrize(
    ("more", "shown", "held"),
    [
        ({"tools": [LOOK, {"type": "custom", "custom": {"name": "patch"}}, {"type": "web_search"}]}, ["look"], None),
        ({"tools": [{"type": "web_search"}]}, None, None),
        ({"tools": [LOOK, GO], "tool_choice": "none"}, None, None),
        ({"tools": [LOOK, GO], "tool_choice": GO}, ["go"], "tool_choice"),
        ({"tools": [LOOK, GO], "tool_choice": ALLOWED}, ["go"], "tool_choice"),
        ({"tools": [LOOK], "parallel_tool_calls": False}, ["look"], "parallel_tool_calls"),
        ({"parallel_tool_calls": False}, None, None),
    ],
)
def test_tool_choice_of_openai(more, shown, held):
    body = ChatRequest.model_validate({"messages": MESSAGES, **more})
    names = body.shown_tools and [tool["function"]["name"] for tool in body.shown_tools]
    assert (names, body.constrained_by) == (shown, held)


def test_codex_request_becomes_a_chat():
    """Fields, tools and items of Codex's client (codex-rs/core/src/client_common.rs)."""
    called = {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"}
    given = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "well"}]},
        called,
        {"type": "function_call_output", "call_id": "c1", "output": "README.md"},
        {"type": "web_search_call", "id": "w", "status": "completed"},
    ]
    tools = [
        {"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object", "properties": {}}},
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": ""}},
        {"type": "local_shell"},
    ]
    others = {"store": False, "include": ["reasoning.encrypted_content"], "service_tier": "auto", "stream": True}
    others |= {"reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"}}
    asked = {"input": given, "tools": tools, "instructions": "Be brief.", "parallel_tool_calls": False, **others}
    chat = ResponsesRequest.model_validate(asked).as_chat()
    assert [message.role for message in chat.messages] == ["system", "developer", "user", "assistant", "tool"]
    assert [message.model_extra.get("reasoning_content") for message in chat.messages] == [*[None] * 3, "well", None]
    assert [tool["function"]["name"] for tool in chat.shown_tools] == ["shell"]
    assert (chat.reasoning_effort, chat.constraint, chat.stream) == ("high", None, True)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "well"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "we"}, {"type": "text", "text": "ll"}]},
        {"type": "reasoning", "text": "well"},
    ],
)
def test_reasoning_among_the_parts_of_a_message_reaches_the_template(part):
    message = Message.model_validate({"role": "assistant", "content": [part, "a"], "reasoning_content": None})
    assert template_message(message) == {"role": "assistant", "content": "a", "reasoning_content": "well"}
    message = Message.model_validate({"role": "assistant", "content": [part, "a"], "reasoning_content": "so"})
    assert template_message(message)["reasoning_content"] == "so"


def test_reasoning_next_to_text_and_calls_is_left_out_if_the_template_rejects_it():
    """As gpt-oss's template does."""
    refused = "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    tokenizer, call = chat_tokenizer(), {"function": {"name": "look", "arguments": "{}"}}
    shown = "{{ m.reasoning_content }}, {{ m.content }}; "
    tokenizer.chat_template = f"{{% for m in messages %}}{refused}{shown}{{% endfor %}}"
    messages = [
        {"role": "assistant", "content": text, "reasoning_content": thought, "thinking": thought, "tool_calls": calls}
        for text, thought, calls in (("a", "one", None), (None, "two", [call]), ("b", "three", [call]))
    ]
    for count, last in ((2, ""), (3, ", b; ")):
        body = ChatRequest.model_validate({"messages": messages[:count]})
        assert tokenizer.decode(render_prompt(tokenizer, body.messages)[0]) == f"one, a; two, ; {last}"


def test_response_repeats_its_request(client):
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}]
    asked = {"tools": tools, "tool_choice": "none", "parallel_tool_calls": True, "instructions": "Be brief."}
    answer = client.responses.create(model="tiny", input="a", max_output_tokens=3, temperature=0.5, **asked)
    assert {name: getattr(answer.tools[0], name) for name in tools[0]} == tools[0]
    assert (answer.tool_choice, answer.parallel_tool_calls, answer.instructions) == ("none", True, "Be brief.")
    assert (answer.max_output_tokens, answer.temperature) == (3, 0.5)
    assert Response.model_validate(answer.model_dump(warnings=False)).usage.output_tokens == 3


REQUIRED = (
    "id object created_at completed_at status incomplete_details model previous_response_id instructions output error "
    "tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty top_logprobs "
    "temperature reasoning usage max_output_tokens max_tool_calls store background service_tier metadata "
    "safety_identifier prompt_cache_key"
)


@pytest.mark.parametrize(
    ("sent", "stated"),
    [({}, (1, 1)), ({"temperature": 0}, (0, 1)), ({"top_p": 0.5}, (1, 0.5)), ({"top_p": 0.0}, (1, 0))],
)
def test_response_has_all_fields_that_open_responses_requires(server, model, monkeypatch, sent, stated):
    """Settings that the request omits have their effective values."""
    monkeypatch.setattr(model.generation_config, "do_sample", True)
    answer = server.post("/v1/responses", {"input": "a", "max_output_tokens": 3, **sent}).json()
    assert {*REQUIRED.split()} <= answer.keys()
    assert ((answer["temperature"], answer["top_p"]), answer["service_tier"]) == (stated, "default")
    assert answer["parallel_tool_calls"], "the default"
