"""Requests exactly as clients send them, and error texts that clients match."""

import json
import time

import pytest
from support import http, tiny
from support.openai_answers import MESSAGES, chat, completion
from support.serving import keys, serving
from support.speaking import chat_tokenizer

from token_recycling.serving.api.messages import MessagesRequest

PROMPT = "for index in"
GREEDY = {"temperature": 0, "max_tokens": 12}
SAME = [
    ({"max_tokens": 5.0}, {"max_tokens": 5}),
    ({"top_k": 40.0, "seed": 3.0, "temperature": 1.0}, {"top_k": 40, "seed": 3, "temperature": 1}),
    ({"stop_token_ids": [70.0]}, {"stop_token_ids": [70]}),
    ({"stop": ""}, {}),
    ({"stop": ["", ""]}, {"stop": []}),
    ({"n": 1.0, "min_tokens": 0.0, "logit_bias": {}}, {}),
    ({"top_p": 0, "temperature": 5}, {"temperature": 0}),
    ({"top_p": 0.0}, {"temperature": 0}),
    ({"top_k": 0, "seed": 0, "temperature": 1.5}, {"seed": 0, "temperature": 1.5}),
]


@pytest.mark.parametrize(("sent", "meant"), SAME)
def test_equivalent_requests_have_equal_outputs(server, sent, meant):
    ways = [{**GREEDY, **more} for more in (sent, meant)]
    for way, more in zip(ways, (sent, meant), strict=True):
        if "temperature" not in more and "top_p" in more:
            del way["temperature"]
    texts = [completion(server, **way).choices[0].text for way in ways]
    assert texts[0] == texts[1] != ""
    messages = [chat(server, **way).choices[0].message.content for way in ways]
    assert messages[0] == messages[1]


def test_tool_choice_any_equals_required(server):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    for choice in ("required", "any", {"type": "any"}):
        body = {"messages": MESSAGES, "tool_choice": choice}
        assert "needs a function" in server.post("/v1/chat/completions", body).json()["error"]["message"]
    error = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": tools, "tool_choice": "look"}).json()
    assert "required, any" in error["error"]["message"]


# Prompts


def test_final_assistant_message_is_continued(server):
    """Anthropic's API does so by default, the others on request."""
    begun = [{"role": "user", "content": "import os"}, {"role": "assistant", "content": "for index in"}]
    wanted = completion(server, prompt="user: import os\nassistant: for index in", **GREEDY).choices[0].text
    for content in ("for index in", [{"type": "text", "text": "for index"}, {"type": "text", "text": " in"}]):
        body = {"messages": [begun[0], {"role": "assistant", "content": content}], **GREEDY}
        assert server.post("/v1/messages", body).json()["content"][0]["text"] == wanted
    prefixed = [begun[0], {**begun[1], "prefix": True}]  # as in the APIs of DeepSeek and Mistral
    assert chat(server, messages=prefixed, **GREEDY).choices[0].message.content == wanted
    items = {"input": begun, "continue_final_message": True, "temperature": 0, "max_output_tokens": 12}
    assert server.post("/v1/responses", items).json()["output"][0]["content"][0]["text"] == wanted
    for more in ({}, {"add_generation_prompt": False}):
        continued = chat(server, messages=begun, continue_final_message=True, **more, **GREEDY)
        assert continued.choices[0].message.content == wanted
    fresh = chat(server, messages=begun[:1], **GREEDY).choices[0].message.content
    empty = {"messages": [begun[0], {"role": "assistant", "content": ""}], **GREEDY}
    assert server.post("/v1/messages", empty).json()["content"][0]["text"] == fresh
    bare = {"messages": begun, "add_generation_prompt": False, "continue_final_message": False, **GREEDY}
    ended = completion(server, prompt="user: import os\nassistant: for index in\n", **GREEDY).choices[0].text
    for path in ("/v1/chat/completions", "/v1/messages"):
        answer = server.post(path, bare).json()
        text = answer["content"][0]["text"] if "content" in answer else answer["choices"][0]["message"]["content"]
        assert text == ended
    counted = server.post("/v1/messages/count_tokens", {"messages": begun}).json()["input_tokens"]
    assert counted == len(server.engine.loaded.tokenizer("user: import os\nassistant: for index in")["input_ids"])


def test_plain_text_documents_become_text():
    plain = {"type": "text", "media_type": "text/plain", "data": "The grass is green."}
    parts = {"type": "content", "content": [{"type": "text", "text": "The sky is blue."}]}
    found = {"type": "search_result", "source": "https://a", "title": "Sea", "content": parts["content"]}
    documents = [{"type": "document", "source": plain, "title": "Facts"}, {"type": "document", "source": parts}, found]
    documents.append({**documents[0], "context": "Spring"})
    result = {"type": "tool_result", "tool_use_id": "t", "content": [documents[0], {"type": "text", "text": "and"}]}
    asked = {"type": "text", "text": "Which?"}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [result, *documents, asked]}]}
    tool, user = MessagesRequest.model_validate(body).as_chat().messages
    assert (tool.role, tool.content) == ("tool", "Facts\nThe grass is green.\nand")
    others = "The sky is blue.\nSea\nThe sky is blue.\nFacts\nSpring\nThe grass is green.\nWhich?"
    assert user.content == f"Facts\nThe grass is green.\n{others}"


def test_system_message_that_only_sets_the_effort_is_skipped():
    """Claude Code sends it where the user changes the effort (router-for-me/CLIProxyAPI#5738)."""
    directive = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    user = {"role": "user", "content": "Hi"}
    made = MessagesRequest(max_tokens=1, messages=[user, directive, {**user, "content": "so"}]).as_chat().messages
    assert [(message.role, message.content) for message in made] == [("user", "Hi"), ("user", "so")]


def test_prompt_is_scored_without_generation(server, tokenizer):
    """lm-eval sends such requests."""
    body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2, "temperature": 0}
    answer = completion(server, **body)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == (PROMPT, "length", 0)
    longer = completion(server, **{**body, "max_tokens": 1}).choices[0].logprobs
    count = len(tokenizer(PROMPT)["input_ids"])
    assert choice.logprobs.tokens == longer.tokens[:count]
    assert choice.logprobs.text_offset == [len("".join(longer.tokens[:place])) for place in range(count)]
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(longer.token_logprobs[1:count], abs=1e-4)
    assert completion(server, prompt=PROMPT, max_tokens=0, echo=True).choices[0].text == PROMPT
    several = completion(server, **{**body, "prompt": [PROMPT, "import os"], "n": 2})
    assert [one.text for one in several.choices] == [PROMPT] * 2 + ["import os"] * 2
    assert several.usage.prompt_tokens == count + len(tokenizer("import os")["input_ids"])


def test_add_special_tokens_applies_to_the_prompt(model):
    tokenizer = tiny.tokenizer_with_bos()
    bare = len(tokenizer(PROMPT, add_special_tokens=False)["input_ids"])
    with serving(model, tokenizer) as server:
        for asked, added in (
            ({}, 1),
            *(({"add_special_tokens": value}, value is not False) for value in (None, True, False)),
        ):
            assert completion(server, prompt=PROMPT, **asked, **GREEDY).usage.prompt_tokens == bare + added


# HTTP


def test_a_byte_order_mark_is_skipped(server):
    content = b"\xef\xbb\xbf" + json.dumps({"prompt": PROMPT, **GREEDY}).encode()
    answer = http.post(f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"] == completion(server, **GREEDY).choices[0].text


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics"])
def test_head_equals_get_without_a_body(server, path):
    got, head = http.get(f"{server.url}{path}"), http.head(f"{server.url}{path}")
    assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("path", ["/v1/models/", "/v1//models", "//v1/models//tiny/"])
def test_extra_slashes_in_paths_are_ignored(server, path):
    """See open-webui/open-webui#16749; a redirect would lose the body, or the TLS of a proxy."""
    assert http.get(f"{server.url}{path}").json()["object"] in ("list", "model")
    answer = server.post("/v1//chat/completions/", {"messages": MESSAGES, **GREEDY})
    assert answer.json()["choices"][0]["message"]["content"] == chat(server, **GREEDY).choices[0].message.content


def test_keys_are_checked_before_a_body_is_parsed(model):
    """The server parses nothing that a client without a key sends."""
    with serving(model, chat_tokenizer(), keys=keys("a"), isolation="per-key") as server:
        for content in (b"{bad", b"[" * 1_900_000):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                began = time.process_time()
                answer = http.post(
                    f"{server.url}/v1/chat/completions",
                    content=content,
                    headers={"Content-Type": "application/json", **headers},
                )
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
                assert time.process_time() - began < 5
        assert server.post("/v1/completions", {"prompt": 5}, "secret-a").status_code == 400


def test_chat_template_is_rendered_once_per_request(server, tokenizer, monkeypatch):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    body = {"messages": MESSAGES, "tools": tools, **GREEDY}
    chat(server, **body)
    rendered, usual = [], type(tokenizer).apply_chat_template

    def render(*args, **kwargs):
        rendered.append(args)
        return usual(*args, **kwargs)

    monkeypatch.setattr(type(tokenizer), "apply_chat_template", render)
    chat(server, **body)
    assert len(rendered) == 1


def test_prompt_that_fills_the_context_is_scored(tokenizer):
    with serving(tiny.llama(vocab_size=300, max_position_embeddings=64), tokenizer) as server:
        for tokens, status in ((0, 200), (1, 400)):
            body = {"prompt": [5] * 64, "max_tokens": tokens, "echo": True, "logprobs": 0}
            answer = server.post("/v1/completions", body)
            assert answer.status_code == status
            assert status == 400 or len(answer.json()["choices"][0]["logprobs"]["token_logprobs"]) == 64
