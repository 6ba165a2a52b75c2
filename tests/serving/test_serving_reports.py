"""Requests from public bug reports about other servers, as their clients send them; this server answers each."""

import pytest
from support import http
from support.cases import paired
from support.functions import HELD
from support.serving import serving
from support.speaking import chat_tokenizer, ending_llama

from token_recycling.serving.conversation import joined
from token_recycling.serving.protocol import ChatRequest

C, H, R, A = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Hi"}
GO = HELD[0]["function"]


def chat_with_call(*, content=None, result="a", **function):
    """Return a conversation in which a function was called."""
    call = {"id": "c1", "type": "function", "function": {"name": "go", **function}}
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    return {"messages": [USER, said, {"role": "tool", "tool_call_id": "c1", "content": result}]}


def tool_turns(*content, result=()):
    """Return a conversation of Anthropic's API in which a tool was called."""
    used = {"type": "tool_use", "id": "t1", "name": "go", "input": {}}
    given = {"type": "tool_result", "tool_use_id": "t1", **dict(result)}
    messages = [USER, {"role": "assistant", "content": [*content, used]}, {"role": "user", "content": [given]}]
    return {"messages": messages, "tools": [{"name": "go", "input_schema": {"type": "object"}}]}


SDK_MESSAGE = {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None, "name": None}
SDK_MESSAGE |= {"function_call": None, "tool_calls": None, "reasoning_content": None}
ITEMS = [
    {"role": "system", "content": "a"},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}],
    },
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "go", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
    {"role": "user", "content": "a"},
]
THOUGHT = {"type": "thinking", "thinking": "a", "signature": ""}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
REPORTS = {
    "mistralai/mistral-common#324, calls without content": (H, chat_with_call(arguments="{}")),
    "agentjido/req_llm#966, calls with empty content": (H, chat_with_call(content="", arguments="{}")),
    "run-llama/llama_index#17555, tool result null": (H, chat_with_call(result=None)),
    "langchain-ai/langchain, tool result in parts": (H, chat_with_call(result=[{"type": "text", "text": "a"}])),
    "vllm-project/vllm#21089, an empty message": (H, {"messages": [USER, {"role": "assistant", "content": ""}, USER]}),
    "vllm-project/vllm#10015, a message as the SDK dumps it": (H, {"messages": [USER, SDK_MESSAGE, USER]}),
    "SWE-agent/SWE-agent#967, no calls": (H, {"messages": [USER, {**SDK_MESSAGE, "tool_calls": []}, USER]}),
    "ggml-org/llama.cpp#17667, a function without parameters": (
        H,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "go"}}], "tool_choice": "required"},
    ),
    "lemonade-sdk/lemonade#540, a function without a description": (
        H,
        {"messages": [USER], "tools": [{"type": "function", "function": {**GO, "description": None, "strict": None}}]},
    ),
    "ggml-org/llama.cpp#10920, no model": (H, {"messages": [{**USER, "name": "user"}], "model": None}),
    "ggml-org/llama.cpp#25515, null": (
        H,
        {"messages": [USER], **dict.fromkeys(("temperature", "top_p", "stop", "seed", "tools", "response_format"))},
    ),
    "gpustack/gpustack#429, stream options without streaming": (
        H,
        {"messages": [USER], "stream_options": {"include_usage": True}},
    ),
    "vllm-project/vllm, a tool choice without tools": (H, {"messages": [USER], "tools": [], "tool_choice": "auto"}),
    "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#138, a conversation": (R, {"input": ITEMS}),
    "vllm-project/vllm#33089, only a call and its output": (R, {"input": ITEMS[4:6]}),
    "vllm-project/vllm#54224, null": (R, {"input": [{**item, "id": None, "type": None} for item in ITEMS[:2]]}),
    "0xPlaygrounds/rig#1362, calls with an empty list of parts": (H, chat_with_call(content=[], arguments="{}")),
    "vercel/ai#5350, a tool whose type is null": (H, {"messages": [USER], "tools": [{"type": None, "function": GO}]}),
    "vllm-project/vllm#44576, a tool result without content": (A, tool_turns(THOUGHT)),
    "vllm-project/vllm#44576, a tool error": (A, tool_turns(result={"content": "a", "is_error": True, **CACHED})),
    "continuedev/continue#1371, stop strings of an editor": (
        H,
        {"messages": [USER], "stop": [*(f"\n{word}" for word in ("class", "def", "function")), *"abcdefghijklmnop"]},
    ),
    "lmstudio-ai/lmstudio-bug-tracker#2254, empty parameters": (
        R,
        {"input": "a", "tools": [{"type": "function", "name": "go", "parameters": {}}], "tool_choice": "required"},
    ),
    "lmstudio-ai/lmstudio-bug-tracker#1652, parameters null": (
        R,
        {"input": "a", "tools": [{"type": "function", "name": "go", "parameters": None, "strict": False}]},
    ),
    "ggml-org/llama.cpp#20156, server-side tools": (
        R,
        {"input": "a", "tools": [{"type": kind, "name": "x"} for kind in ("custom", "web_search", "namespace")]},
    ),
    "langchain-ai/langchain#34751, response parts in a chat": (
        H,
        {"messages": [USER, {"role": "assistant", "content": ITEMS[3]["content"]}, USER]},
    ),
    "InternLM/lmdeploy#4851 and vLLM's own types, reasoning parts in a chat": (
        H,
        {"messages": [USER, {"role": "assistant", "content": [THOUGHT, "a"]}, {"role": "user", "content": ["b"]}]},
    ),
    "lmstudio-ai/lmstudio-bug-tracker#1399, a system message within a conversation": (
        A,
        {"messages": [USER, {"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}, USER]},
    ),
    "Anthropic's server-side tools": (
        A,
        tool_turns(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
            {"type": "text", "text": "a"},
            result={"content": [{"type": "tool_reference", "tool_name": "go"}]},
        ),
    ),
    "ggml-org/llama.cpp#23465, an image in a tool result": (
        R,
        {"input": [*ITEMS[:5], {**ITEMS[5], "output": [{"type": "input_image", "image_url": "data:,"}]}]},
    ),
    "an image result in a chat": (H, chat_with_call(result=[{"type": "image_url", "image_url": {"url": "data:,"}}])),
    "an image result in messages": (
        A,
        tool_turns(result={"content": [{"type": "image", "source": {"type": "base64"}}]}),
    ),
    "a file result": (A, tool_turns(result={"content": [{"type": "document", "source": {"type": "base64"}}]})),
    "BerriAI/litellm#19787, thinking": (
        A,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a", **CACHED}]}],
            "system": [{"type": "text", "text": "a", **CACHED}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "metadata": {"user_id": "a"},
        },
    ),
}


@pytest.fixture(scope="module")
def server():
    with serving(ending_llama(), chat_tokenizer()) as running:
        yield running


@pytest.mark.parametrize(("report", "stream"), paired(REPORTS, [False, True]))
def test_reported_requests_are_answered(server, report, stream):
    path, body = REPORTS[report]
    limit = "max_output_tokens" if path == R else "max_tokens"
    answer = server.post(path, {**body, limit: 8, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert '"error": {' not in answer.text
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


def test_image_in_a_tool_result_becomes_a_note():
    """An image of the user is refused, since the question is about the image."""
    body = ChatRequest.model_validate(chat_with_call(result=[{"type": "text", "text": "a"}, {"type": "image_url"}]))
    assert joined(body.messages[2].content) == "a[a picture, which this model cannot see]"
    with pytest.raises(ValueError, match="text only"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


def test_model_list_has_the_catalog_that_codex_reads(server):
    """See openai/codex#35758: Codex reads `models`, other clients `data`."""
    listed = http.get(f"{server.url}/v1/models?client_version=0.145.0").json()
    assert (listed["models"], listed["data"][0]["id"]) == ([], "tiny")


def test_error_for_a_wrong_base_url_names_the_path(server):
    """See cline/cline#224."""
    for path in ("/chat/completions", "/v1/v1/chat/completions"):
        answer = server.post(path, {"messages": [USER]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert "/v1/chat/completions" in answer.json()["error"]["message"]
    answer = http.get(f"{server.url}/v1/chat/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "GET" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "read"), [("null", {}), (None, {}), ("", {}), ('{"at": 1}', {"at": 1}), ("{at: 1", "{at: 1")]
)
def test_missing_arguments_become_an_empty_object(arguments, read):
    """See kagent-dev/kagent#2851."""
    body = ChatRequest.model_validate(chat_with_call(arguments=arguments))
    assert body.messages[1].tool_calls[0].function.arguments == read
