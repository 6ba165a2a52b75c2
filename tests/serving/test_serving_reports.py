"""Requests that public reports on other servers are about, as their clients send them; each is answered here."""

import pytest
from support import http, tiny
from support.cases import paired
from support.functions import HELD
from support.serving import serving
from support.speaking import chatty, ending_llama

from token_recycling.serving.conversation import joined
from token_recycling.serving.protocol import ChatRequest

C, H, R, A = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "Hi"}
GO = HELD[0]["function"]


def called(*, content=None, result="a", **function):
    """A conversation in which a function was called."""
    call = {"id": "c1", "type": "function", "function": {"name": "go", **function}}
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    return {"messages": [USER, said, {"role": "tool", "tool_call_id": "c1", "content": result}]}


def turns(*content, result=()):
    """A conversation of Anthropic's API in which a tool was called."""
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
    "mistralai/mistral-common#324, no content beside calls": (H, called(arguments="{}")),
    "agentjido/req_llm#966, empty content beside calls": (H, called(content="", arguments="{}")),
    "run-llama/llama_index#17555, a tool gives nothing": (H, called(result=None)),
    "langchain-ai/langchain, a tool gives parts": (H, called(result=[{"type": "text", "text": "a"}])),
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
    "gpustack/gpustack#429, stream options of a whole answer": (
        H,
        {"messages": [USER], "stream_options": {"include_usage": True}},
    ),
    "vllm-project/vllm, a choice without tools": (H, {"messages": [USER], "tools": [], "tool_choice": "auto"}),
    "MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#138, a conversation": (R, {"input": ITEMS}),
    "vllm-project/vllm#33089, the output of a call alone": (R, {"input": ITEMS[4:6]}),
    "vllm-project/vllm#54224, null": (R, {"input": [{**item, "id": None, "type": None} for item in ITEMS[:2]]}),
    "0xPlaygrounds/rig#1362, an empty list of parts beside calls": (H, called(content=[], arguments="{}")),
    "vercel/ai#5350, a tool whose type is null": (H, {"messages": [USER], "tools": [{"type": None, "function": GO}]}),
    "vllm-project/vllm#44576, results without content": (A, turns(THOUGHT)),
    "vllm-project/vllm#44576, an error": (A, turns(result={"content": "a", "is_error": True, **CACHED})),
    "continuedev/continue#1371, stops of an editor": (
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
    "ggml-org/llama.cpp#20156, tools of servers": (
        R,
        {"input": "a", "tools": [{"type": kind, "name": "x"} for kind in ("custom", "web_search", "namespace")]},
    ),
    "langchain-ai/langchain#34751, parts of responses in a chat": (
        H,
        {"messages": [USER, {"role": "assistant", "content": ITEMS[3]["content"]}, USER]},
    ),
    "InternLM/lmdeploy#4851 and vLLM's own types, reasoning among the parts of a chat": (
        H,
        {"messages": [USER, {"role": "assistant", "content": [THOUGHT, "a"]}, {"role": "user", "content": ["b"]}]},
    ),
    "lmstudio-ai/lmstudio-bug-tracker#1399, a system message between others": (
        A,
        {"messages": [USER, {"role": "assistant", "content": "a"}, {"role": "system", "content": "b"}, USER]},
    ),
    "a conversation with tools of Anthropic's servers": (
        A,
        turns(
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "a"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
            {"type": "text", "text": "a"},
            result={"content": [{"type": "tool_reference", "tool_name": "go"}]},
        ),
    ),
    "ggml-org/llama.cpp#23465, a picture that a tool gave": (
        R,
        {"input": [*ITEMS[:5], {**ITEMS[5], "output": [{"type": "input_image", "image_url": "data:,"}]}]},
    ),
    "the same in a chat": (H, called(result=[{"type": "image_url", "image_url": {"url": "data:,"}}])),
    "the same in messages": (A, turns(result={"content": [{"type": "image", "source": {"type": "base64"}}]})),
    "a file that a tool gave": (A, turns(result={"content": [{"type": "document", "source": {"type": "base64"}}]})),
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
    with serving(ending_llama(), chatty(tiny.tokenizer())) as running:
        yield running


@pytest.mark.parametrize(("report", "stream"), paired(REPORTS, [False, True]))
def test_what_reports_are_about_is_answered(server, report, stream):
    path, body = REPORTS[report]
    limit = "max_output_tokens" if path == R else "max_tokens"
    answer = server.post(path, {**body, limit: 8, "stream": stream})
    assert answer.status_code == 200, answer.text
    assert '"error": {' not in answer.text
    assert answer.headers["content-type"].startswith("text/event-stream" if stream else "application/json")


def test_a_model_is_told_of_a_picture_that_a_tool_gave():
    """One of the user is refused: what is asked is about it."""
    body = ChatRequest.model_validate(called(result=[{"type": "text", "text": "a"}, {"type": "image_url"}]))
    assert joined(body.messages[2].content) == "a[a picture, which this model cannot see]"
    with pytest.raises(ValueError, match="text only"):
        ChatRequest.model_validate({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


def test_codex_finds_a_catalog_of_models(server):
    """As in openai/codex#35758, which is read beside the list of OpenAI's API."""
    listed = http.get(f"{server.url}/v1/models?client_version=0.145.0").json()
    assert (listed["models"], listed["data"][0]["id"]) == ([], "tiny")


def test_a_base_url_without_the_version_is_said(server):
    """As in cline/cline#224."""
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
def test_a_call_without_arguments_has_an_empty_object(arguments, read):
    """As in kagent-dev/kagent#2851."""
    body = ChatRequest.model_validate(called(arguments=arguments))
    assert body.messages[1].tool_calls[0].function.arguments == read
