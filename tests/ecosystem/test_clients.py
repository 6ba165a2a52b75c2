"""Installed client libraries against the server: chats, structured outputs, tool calls and streams.

The model is random: tool calls are required and outputs have a schema, so that grammars enforce them.
"""

import asyncio
import json
from typing import Literal

import pydantic
import pytest
from support.serving import serving
from support.speaking import chat_tokenizer, ending_llama

HELLO = [{"role": "user", "content": "hello"}]
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"type": "string", "enum": ["here", "there"]}},
    "required": ["at"],
    "additionalProperties": False,
}
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}


class Place(pydantic.BaseModel):
    at: Literal["here", "there"]


@pytest.fixture(scope="module")
def server():
    model = ending_llama()
    with serving(model, chat_tokenizer()) as running:
        yield running


@pytest.fixture(scope="module")
def text(server):
    """The model's answer to `hello`."""
    how = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 12}
    return server.client().chat.completions.create(**how).choices[0].message.content


# openai


def test_openai_parses_chats(server):
    client = server.client()
    how = {"model": "tiny", "messages": HELLO, "response_format": Place, "temperature": 0}
    assert client.chat.completions.parse(**how).choices[0].message.parsed.at in ("here", "there")
    with client.chat.completions.stream(**how) as stream:
        assert any(event.type == "content.delta" for event in stream)
        assert stream.get_final_completion().choices[0].message.parsed.at in ("here", "there")
    with client.chat.completions.stream(
        model="tiny", messages=HELLO, tools=[LOOK], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert len(pieces) > 1
    assert Place.model_validate_json(call.function.arguments)


def test_openai_parses_responses(server):
    client = server.client()
    how = {"model": "tiny", "input": "hello", "text_format": Place, "temperature": 0}
    assert client.responses.parse(**how).output_parsed.at in ("here", "there")
    with client.responses.stream(**how) as stream:
        assert stream.get_final_response().output_parsed.at in ("here", "there")
    with client.responses.stream(model="tiny", input="hello", max_output_tokens=3) as stream:
        assert stream.get_final_response().status == "incomplete"


# openai-agents


@pytest.fixture(params=["responses", "chat"])
def agents_model(server, request):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    import openai

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    kind = agents.OpenAIResponsesModel if request.param == "responses" else agents.OpenAIChatCompletionsModel
    return kind(model="tiny", openai_client=client)


def test_output_of_an_agent_has_its_type(agents_model):
    import agents

    agent = agents.Agent(name="a", instructions="Be brief.", model=agents_model, output_type=Place)
    assert asyncio.run(agents.Runner.run(agent, "hello")).final_output.at in ("here", "there")


@pytest.mark.parametrize("streamed", [False, True])
def test_agent_with_an_output_type_calls_a_function(agents_model, streamed):
    import agents

    called = []

    @agents.function_tool
    def look(at: Literal["here", "there"]) -> str:
        """Looks."""
        called.append(at)
        return at

    agent = agents.Agent(
        name="a", model=agents_model, tools=[look], output_type=Place if not streamed else None,
        model_settings=agents.ModelSettings(tool_choice="required", parallel_tool_calls=False),
        tool_use_behavior="stop_on_first_tool",
    )  # fmt: skip

    async def run():
        if not streamed:
            return await agents.Runner.run(agent, "hello")
        result = agents.Runner.run_streamed(agent, "hello")
        async for _ in result.stream_events():
            pass
        return result

    assert asyncio.run(run()).final_output == called[0]


# langchain-openai


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(server, text, responses):
    langchain = pytest.importorskip("langchain_openai")
    how = {"base_url": f"{server.url}/v1", "api_key": "none", "temperature": 0, "use_responses_api": responses}
    chat = langchain.ChatOpenAI(model="tiny", max_tokens=12, reasoning_effort="low", **how)
    said = chat.invoke("hello")
    assert said.text == text
    assert said.usage_metadata["output_tokens"] == 12
    assert "".join(part.text for part in chat.stream("hello")) == text
    longer = langchain.ChatOpenAI(model="tiny", **how)
    assert longer.with_structured_output(Place).invoke("hello").at in ("here", "there")
    (call,) = longer.bind_tools([LOOK], tool_choice="look").invoke("hello").tool_calls
    assert (call["name"], call["args"]["at"] in ("here", "there")) == ("look", True)


# litellm, which aider uses too, with `extra_body` and required tool calls


def test_litellm(server, text):
    litellm = pytest.importorskip("litellm")
    how = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none", "messages": HELLO}
    assert litellm.completion(**how, temperature=0, max_tokens=12).choices[0].message.content == text
    more = {"extra_body": {"reasoning_effort": "high", "usage": {"include": True}}}
    parts = litellm.completion(**how, **more, temperature=0, max_tokens=12, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text
    called = litellm.completion(**how, tools=[LOOK], tool_choice="required").choices[0].message.tool_calls[0]
    assert Place.model_validate_json(called.function.arguments)
    assert Place.model_validate_json(litellm.completion(**how, response_format=Place).choices[0].message.content)
    anthropics = {**how, "model": "anthropic/tiny", "api_base": server.url}
    assert litellm.completion(**anthropics, temperature=0, max_tokens=12).choices[0].message.content == text


# anthropic


def test_anthropic(server, text):
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    # Release 2 has no argument `temperature`.
    how = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "extra_body": {"temperature": 0}}
    said = client.messages.create(**how)
    assert (said.content[0].text, said.stop_reason) == (text, "max_tokens")
    with client.messages.stream(**how) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == 12
    tool = {"name": "look", "description": "Looks.", "input_schema": PARAMETERS}
    calling = {**how, "max_tokens": 400, "tools": [tool], "tool_choice": {"type": "any"}}
    with client.messages.stream(**calling) as stream:
        final = stream.get_final_message()
    call = next(block for block in final.content if block.type == "tool_use")
    assert (final.stop_reason, call.name, call.input["at"] in ("here", "there")) == ("tool_use", "look", True)
    assert client.messages.count_tokens(model="tiny", messages=HELLO).input_tokens > 0
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**{**how, "max_tokens": 0})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**how, "model": "other"})


# Requests as sent by clients in other languages or with incompatible dependencies


def test_opencode(server):
    """As sent by @ai-sdk/openai-compatible (getArgs and doStream of its chat language model) on the second turn."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"here"}'}}
    body = {
        "model": "tiny",
        "max_tokens": 32000,
        "temperature": 0,
        "top_p": 1,
        "reasoning_effort": "medium",
        "verbosity": "low",
        "user": "me",
        "messages": [
            {"role": "system", "content": "You are opencode."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " again"}]},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "well"},
            {"role": "tool", "tool_call_id": "c1", "content": "found"},
        ],
        "tools": [LOOK],
        "tool_choice": "required",
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    calls = [
        call for chunk in chunks if chunk["choices"] for call in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    # The SDK starts a call at the part with name and id, and concatenates the arguments of all parts.
    assert [call["function"]["name"] for call in calls if call.get("id")] == ["look"] * (calls[-1]["index"] + 1)
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    first = "".join(call["function"]["arguments"] for call in calls if call["index"] == 0)
    assert Place.model_validate_json(first)
