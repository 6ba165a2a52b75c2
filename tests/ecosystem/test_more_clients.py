"""Clients that parse streams incrementally, and the errors that they raise.

The model emits the output set by a test, several tokens a step.
"""

import asyncio
import json

import pytest
from support.functions import TOOLS
from support.serving import serving

pytest.register_assert_rewrite("serving.tools.conftest")
from serving.tools.conftest import model, says, tokenizer  # noqa: E402, F401

HELLO = [{"role": "user", "content": "hello"}]
ARGUMENTS = [{"at": 1, "why": "first of several"}, {"at": 2, "why": "second of several"}]
CALLS = [f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': one})}\n</tool_call>" for one in ARGUMENTS]
"""In the family's own format: strict functions, which some clients send, allow nothing else."""
SAID = f"<think>well</think>One.{CALLS[0]}\n{CALLS[1]}"
PREDICTION = {"type": "content", "content": SAID}


@pytest.fixture(scope="module")
def server(model, tokenizer):  # noqa: F811
    with serving(model, tokenizer, max_prompt_tokens=600) as running:
        yield running


def test_instructor_fills_partials(server, says):  # noqa: F811
    instructor = pytest.importorskip("instructor")
    import pydantic

    class Look(pydantic.BaseModel):
        at: int
        why: str

    client = instructor.from_openai(server.client(), mode=instructor.Mode.TOOLS)
    how = {"model": "tiny", "messages": HELLO, "extra_body": {"prediction": PREDICTION}, "tool_choice": "auto"}
    says(CALLS[0].replace("look", "PartialLook"))  # the function that the client defines
    partials = list(client.chat.completions.create_partial(response_model=Look, **how))
    assert partials[-1].model_dump() == ARGUMENTS[0]
    says(CALLS[0].replace("look", "Look"))
    assert client.chat.completions.create(response_model=Look, **how).model_dump() == ARGUMENTS[0]


def test_langchain_openai_merges_streamed_calls(server, says):  # noqa: F811
    langchain = pytest.importorskip("langchain_openai")
    says(SAID)
    chat = langchain.ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key="none", max_tokens=400)
    bound = chat.bind_tools(TOOLS)
    chunks = list(bound.stream("hello"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [call["args"] for call in whole.tool_calls] == ARGUMENTS
    assert [call["args"] for call in bound.invoke("hello").tool_calls] == ARGUMENTS


def test_langchain_anthropic_merges_streamed_calls(server, says):  # noqa: F811
    langchain = pytest.importorskip("langchain_anthropic")
    says(SAID)
    chat = langchain.ChatAnthropic(model="tiny", base_url=server.url, api_key="none", max_tokens=400)
    bound = chat.bind_tools([{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}])
    whole = None
    for chunk in bound.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == ARGUMENTS
    assert [call["args"] for call in bound.invoke("hello").tool_calls] == ARGUMENTS


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_pydantic_ai_runs_functions(server, says, api):  # noqa: F811
    ai = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    if api == "anthropic":
        model = AnthropicModel("tiny", provider=AnthropicProvider(base_url=server.url, api_key="none"))
    else:
        kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
        model = kind("tiny", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    looked = []
    agent = ai.Agent(model, model_settings={"max_tokens": 400})

    @agent.tool_plain
    def look(at: int, why: str) -> str:
        looked.append({"at": at, "why": why})
        says("done")
        return "seen"

    async def run():
        says(SAID)
        async with agent.iter("hello") as steps:
            async for node in steps:
                if ai.Agent.is_model_request_node(node):
                    async with node.stream(steps.ctx) as events:
                        async for _ in events:
                            pass
        return steps.result.output

    assert asyncio.run(run()) == "done"
    assert sorted(looked, key=lambda one: one["at"]) == ARGUMENTS
    says("done")
    assert asyncio.run(agent.run("hello")).output == "done"


def test_anthropic_accumulates_truncated_calls(server, says, tokenizer):  # noqa: F811
    anthropic = pytest.importorskip("anthropic")
    says(SAID)
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    tools = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]
    limit = len(tokenizer(SAID)["input_ids"]) - len(tokenizer(" of several")["input_ids"]) - 13
    for tokens, reason in ((400, "tool_use"), (limit, "max_tokens")):
        how = {"model": "tiny", "messages": HELLO, "tools": tools, "max_tokens": tokens}
        with client.messages.stream(**how) as stream:
            streamed = stream.get_final_message()
        assert (streamed.stop_reason, streamed.content[0].thinking) == (reason, "well")
        assert next(block.input for block in streamed.content if block.type == "tool_use") == ARGUMENTS[0]
    with client.messages.stream(
        model="tiny", messages=[*HELLO, {"role": "assistant", "content": "so "}], max_tokens=4
    ) as s:
        assert s.get_final_message().content


def test_context_errors_have_the_clients_own_types(server):
    long = [{"role": "user", "content": "a b c " * 600}]
    litellm = pytest.importorskip("litellm")
    how = {"api_key": "none", "messages": long, "max_tokens": 4}
    for name, base in (("openai/tiny", f"{server.url}/v1"), ("anthropic/tiny", server.url)):
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(model=name, api_base=base, **how)
    import langchain_anthropic
    import langchain_openai
    from langchain_core.exceptions import ContextOverflowError

    for responses in (False, True):
        chat = langchain_openai.ChatOpenAI(
            model="tiny", base_url=f"{server.url}/v1", api_key="none", use_responses_api=responses
        )
        with pytest.raises(ContextOverflowError):
            chat.invoke(long[0]["content"])
    chat = langchain_anthropic.ChatAnthropic(model="tiny", base_url=server.url, api_key="none", max_tokens=4)
    with pytest.raises(ContextOverflowError):
        chat.invoke(long[0]["content"])


def test_agents_stream_several_calls(server, says):  # noqa: F811
    agents = pytest.importorskip("agents")
    import openai

    agents.set_tracing_disabled(True)
    looked = []
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        looked.append([])

        @agents.function_tool
        def look(at: int, why: str) -> str:
            """Looks."""
            looked[-1].append({"at": at, "why": why})
            says("done")
            return "seen"

        says(SAID)
        agent = agents.Agent(name="a", model=kind(model="tiny", openai_client=client), tools=[look])

        async def run(agent=agent):
            result = agents.Runner.run_streamed(agent, "hello")
            async for _ in result.stream_events():
                pass
            return result

        assert asyncio.run(run()).final_output == "done"
        assert sorted(looked[-1], key=lambda one: one["at"]) == ARGUMENTS
