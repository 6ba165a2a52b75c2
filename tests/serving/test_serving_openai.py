"""The official client against the server: what it asks for it gets, and the text is the model's own."""

import time

import httpx2
import pytest
import torch
from openai.types.responses import Response
from support import tiny
from support.serving import PROMPT, serving
from support.speaking import CONTEXT

from token_recycling.serving import app
from token_recycling.serving.protocol import ChatRequest
from token_recycling.serving.responses import ResponsesRequest
from token_recycling.serving.templates import render_prompt

MESSAGES = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture(scope="module")
def reference(model, tokenizer):
    """What `generate` says."""

    def generated(prompt, seed=None, **arguments):
        ids = tokenizer(prompt, return_tensors="pt")
        if seed is not None:
            torch.manual_seed(seed)
            arguments |= {"do_sample": True, "temperature": 1.5, "top_k": 0}
        arguments = {"max_new_tokens": 24, "do_sample": False, **arguments}
        said = model.generate(**ids, pad_token_id=0, **arguments)[0, ids["input_ids"].shape[1] :]
        return tokenizer.decode(said, skip_special_tokens=True)

    return generated


def complete(client, prompt=PROMPT, **more):
    return client.completions.create(**{"model": "tiny", "prompt": prompt, "max_tokens": 24, **more})


def streamed(stream):
    chunks = list(stream)
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks


def test_greedy_text_is_that_of_generate(client, reference):
    answer = complete(client, temperature=0)
    assert answer.choices[0].text == reference(PROMPT)
    assert (answer.model, answer.object, answer.choices[0].finish_reason) == ("tiny", "text_completion", "length")
    assert answer.usage.completion_tokens == 24


def test_usage_tells_what_drafting_was_worth(client):
    complete(client, temperature=0, max_tokens=60)
    usage = complete(client, temperature=0, max_tokens=60).usage
    said = usage.model_extra["speculation"]
    assert said["accelerated"]
    assert said["drafter"].startswith("recycling")
    assert said["mat"] == pytest.approx(60 / said["steps"], abs=1e-4)
    assert said["steps"] < 60
    assert said["accepted_tokens"] == 60 - said["steps"]
    assert said["accepted_tokens"] <= said["drafted_tokens"]
    assert said["tokens_per_second"] > 0


def test_a_stream_is_the_same_text_in_pieces_with_usage_at_its_end(client, server):
    whole = complete(client, temperature=0).choices[0].text
    text, chunks = streamed(complete(client, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert text == whole
    assert len(chunks) > 3
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage.model_extra["speculation"]["steps"] > 0
    assert not any(chunk.usage for chunk in chunks[:-1])
    raw = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 4, "stream": True})
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")
    assert "usage" not in raw.text


def test_temperature_draws_and_equal_seeds_give_equal_texts(client, reference):
    drawn = [complete(client, temperature=1.5, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0] == reference(PROMPT, seed=1)
    for sampled in ({"temperature": 1.5}, {"top_p": 0.99}):
        assert len({complete(client, **sampled).choices[0].text for _ in range(6)}) > 1


def test_an_answer_without_a_limit_ends_where_the_context_does(client, server):
    answer = complete(client, server.service.loaded.tokenizer.decode([5]) * (CONTEXT - 40), max_tokens=1000)
    assert answer.usage.total_tokens == CONTEXT
    assert answer.choices[0].finish_reason == "length"


def chat(client, **more):
    return client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 24, **more})


def test_chat_goes_through_the_template(client, reference):
    wanted = reference("user: import os\nassistant: ")
    answer = chat(client, temperature=0)
    assert answer.choices[0].message.content == wanted
    assert answer.usage.model_extra["speculation"]["steps"] > 0
    assert chat(client, temperature=0, max_tokens=None, max_completion_tokens=5).usage.completion_tokens == 5
    parts = [{"role": "user", "content": [{"type": "text", "text": "import os"}]}]
    assert chat(client, temperature=0, messages=parts).choices[0].message.content == wanted


def test_responses(client, reference):
    wanted = reference("user: import os\nassistant: ")
    arguments = {"model": "tiny", "input": "import os", "max_output_tokens": 24, "temperature": 0}
    answer = client.responses.create(**arguments)
    assert answer.output_text == wanted
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.model_extra["speculation"]["steps"] > 0
    events = list(client.responses.create(**arguments, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted
    assert events[-1].type == "response.completed"
    with client.responses.stream(**arguments) as stream:
        final = stream.get_final_response()
    assert (final.output_text, final.status, final.incomplete_details.reason) == (
        wanted,
        "incomplete",
        "max_output_tokens",
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].response.usage.model_extra["speculation"]["steps"] > 0


def test_every_name_of_the_model_is_listed_and_answered(model):
    with serving(model, tiny.tokenizer(), aliases=("two/three",)) as server:
        client = server.client()
        assert [one.id for one in client.models.list()] == ["tiny", "two/three"]
        assert client.models.retrieve("two/three").model_extra["max_model_len"] == CONTEXT
        assert client.completions.create(model="two/three", prompt="a", max_tokens=1).model == "tiny"


def test_generation_config_of_transformers_own_clients(client, reference):
    given = '{"do_sample": false, "repetition_penalty": 1.3, "max_new_tokens": 12}'
    answer = complete(client, max_tokens=None, extra_body={"generation_config": given})
    assert answer.choices[0].text == reference(PROMPT, max_new_tokens=12, repetition_penalty=1.3)


def test_the_api_describes_itself(server):
    described = httpx2.get(f"{server.url}/openapi.json").json()
    for path in ("completions", "chat/completions", "responses", "messages"):
        body = described["paths"][f"/v1/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        name = body["$ref"].rpartition("/")[2]
        assert "temperature" in described["components"]["schemas"][name]["properties"]


def test_a_silent_stream_has_comments(model, tokenizer, monkeypatch):
    """While a prompt is read; the official client passes over them."""
    monkeypatch.setattr(app, "_SILENCE", 0.02)
    hook = model.register_forward_pre_hook(lambda *args: time.sleep(0.2))
    try:
        with serving(model, tokenizer) as server:
            text = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2, "stream": True}).text
            assert text.startswith(": keep-alive\n\n")
            assert text.endswith("data: [DONE]\n\n")
            assert "".join(one.choices[0].text for one in complete(server.client(), max_tokens=2, stream=True))
    finally:
        hook.remove()


# Requests as agents send them


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        ([{"role": "developer", "content": "Be brief."}], "system: Be brief.\n"),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "user: ab\n"),
        ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], "assistant: No.\n"),
        ([{"role": "user", "content": "a", "name": None}], "user: a\n"),
    ],
)
def test_messages_as_they_come_are_rendered(tokenizer, messages, shown):
    body = ChatRequest.model_validate({"messages": messages})
    assert tokenizer.decode(render_prompt(tokenizer, body.messages)[0]) == f"{shown}assistant: "


def test_a_developer_is_shown_by_a_template_that_names_it(tokenizer, monkeypatch):
    template = f"{{# system or developer #}}{tokenizer.chat_template}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    body = ChatRequest.model_validate({"messages": [{"role": "developer", "content": "a"}]})
    assert tokenizer.decode(render_prompt(tokenizer, body.messages)[0]).startswith("developer: a")


LOOK, GO = ({"type": "function", "function": {"name": name}} for name in ("look", "go"))


@pytest.mark.parametrize(
    ("more", "shown", "held"),
    [
        ({"tools": [LOOK, {"type": "custom", "custom": {"name": "patch"}}, {"type": "web_search"}]}, ["look"], None),
        ({"tools": [{"type": "web_search"}]}, None, None),
        ({"tools": [LOOK, GO], "tool_choice": "none"}, None, None),
        ({"tools": [LOOK, GO], "tool_choice": GO}, ["go"], "tool_choice"),
        ({"tools": [LOOK, GO], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}, ["look", "go"], None),
        (
            {"tools": [LOOK, GO], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [GO]}}},
            ["go"],
            None,
        ),
        (
            {
                "tools": [LOOK, GO],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [GO]}},
            },
            ["go"],
            "tool_choice",
        ),
        ({"tools": [LOOK], "parallel_tool_calls": False}, ["look"], "parallel_tool_calls"),
        ({"parallel_tool_calls": False}, None, None),
    ],
)
def test_tools_are_chosen_as_openai_defines_it(more, shown, held):
    body = ChatRequest.model_validate({"messages": MESSAGES, **more})
    assert (body.shown_tools and [tool["function"]["name"] for tool in body.shown_tools], body.constrained_by) == (
        shown,
        held,
    )


def test_what_codex_sends_is_a_chat():
    """Fields, tools and items as Codex's client has them (codex-rs/core/src/client_common.rs)."""
    body = ResponsesRequest.model_validate(
        {
            "model": "tiny",
            "instructions": "You are a coding agent.",
            "input": [
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list files"}]},
                {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "x"},
                {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "c1"},
                {"type": "function_call_output", "call_id": "c1", "output": "README.md"},
                {"type": "web_search_call", "id": "w", "status": "completed"},
            ],
            "tools": [
                {
                    "type": "function",
                    "name": "shell",
                    "strict": False,
                    "parameters": {"type": "object", "properties": {}},
                },
                {
                    "type": "custom",
                    "name": "apply_patch",
                    "format": {"type": "grammar", "syntax": "lark", "definition": ""},
                },
                {"type": "web_search"},
                {"type": "local_shell"},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "high", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "key",
            "service_tier": "auto",
            "text": {"verbosity": "low"},
        }
    )
    chat = body.as_chat()
    assert [message.role for message in chat.messages] == ["system", "developer", "user", "assistant", "tool"]
    assert [tool["function"]["name"] for tool in chat.shown_tools] == ["shell"]
    assert (chat.reasoning_effort, chat.form, chat.stream) == ("high", None, True)


def test_a_response_repeats_its_request(client):
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}]
    asked = {"tools": tools, "tool_choice": "none", "parallel_tool_calls": True, "instructions": "Be brief."}
    answer = client.responses.create(model="tiny", input="a", max_output_tokens=3, temperature=0.5, **asked)
    assert {name: getattr(answer.tools[0], name) for name in tools[0]} == tools[0]
    assert (answer.tool_choice, answer.parallel_tool_calls, answer.instructions) == ("none", True, "Be brief.")
    assert (answer.max_output_tokens, answer.temperature) == (3, 0.5)
    assert Response.model_validate(answer.model_dump(warnings=False)).usage.output_tokens == 3
