"""Complete event sequences, as the vendors' own clients read them, for a family of texts truncated anywhere.

The parts of an output follow from the scripted text, and its end from the number of tokens; both determine the sequence
of event types. Every event must be of a vendor's type, and the vendor's accumulator must join the events to the answer
of the same request without streaming.
"""

from __future__ import annotations

import json
import re

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.cases import parameter, thinned
from support.functions import FLAT, TOOLS
from support.serving import serving
from transformers import LogitsProcessor

from token_recycling.serving import generation


def call(at, why="so"):
    return f'<tool_call>{{"name": "look", "arguments": {json.dumps({"at": at, "why": why})}}}</tool_call>'


TEXTS = {
    "text": "Hello there.",
    "nothing": "",
    "reasoning": "<think>well</think>",
    "reasoning, text": "<think>well</think>Hello.",
    "call": call([1, {"a": '}\\"]'}], "{["),
    "text, call": f"Let me see.{call(1)}",
    "calls": f"{call(1)}{call(2)}",
    "all": f"<think>well</think>One.{call(1)}Two.{call(2, 'else')}",
}
RESPONSE_EVENT = TypeAdapter(ResponseStreamEvent)
MESSAGES = [{"role": "user", "content": "a"}]
ANTHROPIC = [{"name": "look", "input_schema": {"type": "object", "properties": {}}}]


def arguments_of(called):
    """Return the arguments of a call as far as they are written."""
    arguments = called.partition('"arguments": ')[2]
    try:
        return arguments[: json.JSONDecoder().raw_decode(arguments)[1]]
    except ValueError:
        return arguments


def parts_of(text):
    """Return the (kind, text) parts of a text that is cut within no delimiter; the text of a call is its arguments."""
    parts = []
    for found in re.finditer(r"<think>(.*?)(?:</think>|$)|<tool_call>(.*?)(?:</tool_call>|$)|([^<]+)", text):
        thought, called, said = found.groups()
        if said:
            parts.append(("text", said))
        elif called is not None:
            parts.append(("call", arguments_of(called)))
        elif thought:
            parts.append(("reasoning", thought))
    return parts


def cuts(tokenizer, text):
    """Yield (token count, prefix) of cuts that are neither within a delimiter nor in a call before its arguments."""
    ids = tokenizer(text)["input_ids"]
    for count in range(1, len(ids)):
        prefix = tokenizer.decode(ids[:count])
        rest = re.sub(r"</?think>|</tool_call>|<tool_call>[^<]*\"arguments\": \{", "", prefix)
        if "<" not in rest:
            yield count, prefix


def limits(tokenizer, text):
    """Return (limit, text) pairs: the whole text and its EOS token, then some cuts."""
    ids, found = tokenizer(text)["input_ids"], list(cuts(tokenizer, text))
    return [(len(ids) + 1, text), *found[:: max(1, len(found) // 2)]]


def finish_reason_of(text, shown):
    """Return the finish reason of an output that shows this prefix of the text."""
    if "<tool_call>" in shown and shown.count("<tool_call>") == shown.count("</tool_call>"):
        return "tool_calls"
    return "stop" if shown == text else "length"


class Failing(LogitsProcessor):
    """Raises an error after some tokens."""

    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("made to fail")
        return scores


@pytest.fixture(scope="module")
def server(model, tokenizer):
    with serving(model, tokenizer, drafter="recycling:tree=64") as running:
        yield running


@pytest.fixture
def failing(monkeypatch):
    """Return a function that makes outputs fail after some tokens."""

    def after(tokens):
        scripted = generation.processors

        def processors(wanted, *more):
            usual = scripted(wanted, *more)
            return type(usual)([*usual, Failing(wanted.ids.shape[-1] + tokens)])

        monkeypatch.setattr(generation, "processors", processors)

    return after


def events_of(server, path, body):
    """Return the data of all events; the names of events must equal the types in the data."""
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200
    assert answer.text.endswith("\n\n")
    events = []
    for event in answer.text.removesuffix("\n\n").split("\n\n"):
        *name, data = event.split("\n")
        data = data.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
        assert not name or name == [f"event: {events[-1]['type']}"]
    return events


def merged_deltas(types):
    """Return the types with consecutive deltas of a part merged."""
    listed = []
    for kind in types:
        if not (kind.endswith((".delta", "block_delta")) and listed[-1:] == [kind]):
            listed.append(kind)
    return listed


# Chat


def chat_body(text, limit, predicted, **more):
    how = {} if predicted else {"speculation": {"enabled": False}}
    if predicted and text:
        how["prediction"] = {"type": "content", "content": text}
    return {"messages": MESSAGES, "tools": TOOLS, "max_tokens": limit, **how, **more}


def assert_choice(chunks, index, whole):
    """Assert that the chunks of a choice are in order and join to the whole choice."""
    own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == index]
    first, *others = own
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert not any(choice.delta.role for choice in others)
    assert all(choice.finish_reason or choice.delta.model_dump(exclude_unset=True) for choice in others)
    assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + [whole["finish_reason"]]
    text = "".join(choice.delta.content or "" for choice in own)
    thought = "".join(choice.delta.model_extra.get("reasoning_content") or "" for choice in own)
    assert (text, thought) == (whole["message"]["content"] or "", whole["message"].get("reasoning_content", ""))
    begun = [call for choice in own for call in choice.delta.tool_calls or () if call.id or call.function.name]
    assert [call.index for call in begun] == list(range(len(begun)))
    assert [call.function.name for call in begun] == ["look"] * len(begun)
    assert len({call.id for call in begun}) == len(begun)
    for choice in own:
        indices = [call.index for call in choice.delta.tool_calls or ()]
        assert len(indices) == len({*indices}), "a chunk has one entry per call"


ONE_BY_ONE = ("nothing", "reasoning, text", "call", "all")
PACES = [
    *(
        parameter(name, True, every_run=name not in ONE_BY_ONE or name == "all", id=f"{name}, several per step")
        for name in TEXTS
    ),
    *(parameter(name, False, every_run=name in ONE_BY_ONE, id=f"{name}, one per step") for name in TEXTS),
]


@pytest.mark.parametrize(("name", "predicted"), PACES)
def test_chunks_of_a_chat(server, says, tokenizer, name, predicted):
    """With the text as its prediction, as in the request without streaming, a step has many tokens.

    Every second limit requests usage. The first limit is that of the whole text, with two choices.
    """
    text = TEXTS[name]
    says(text)
    for place, (limit, shown) in enumerate(limits(tokenizer, text)):
        n, usage = 1 if place else 2, place % 2 == 0
        body = chat_body(text, limit, predicted, n=n)
        asked = {**body, **({"stream_options": {"include_usage": True}} if usage else {})}
        *events, done = events_of(server, "/v1/chat/completions", asked)
        whole = server.post("/v1/chat/completions", chat_body(text, limit, True, n=n)).json()
        assert done == "[DONE]"
        chunks = [ChatCompletionChunk.model_validate(event) for event in events]
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        if usage:
            *chunks, last = chunks
            assert (last.choices, last.usage.completion_tokens) == ([], whole["usage"]["completion_tokens"])
            if (name, place) == ("all", 0):
                mat = last.usage.model_extra["speculation"]["mat"]
                assert mat > 3 if predicted else mat == 1
        assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)
        assert [chunk.choices[0].delta.role for chunk in chunks[:n]] == ["assistant"] * n
        state = ChatCompletionStreamState()
        for chunk in chunks:
            state.handle_chunk(chunk)
        expected, reason = parts_of(shown), finish_reason_of(text, shown)
        for index, choice in enumerate(state.current_completion_snapshot.choices):
            message = choice.message
            calls = [one.function.arguments for one in message.tool_calls or ()]
            assert (message.content or "") == "".join(part for kind, part in expected if kind == "text")
            assert calls == [part for kind, part in expected if kind == "call"]
            assert choice.finish_reason == reason
            assert_choice(chunks, index, whole["choices"][index])
            said = whole["choices"][index]["message"].get("tool_calls", ())
            assert [one["function"]["arguments"] for one in said] == calls
            if calls and not predicted and shown == text:
                pieces = [piece for chunk in chunks for piece in chunk.choices[0].delta.tool_calls or ()]
                assert len(pieces) > len(calls), "arguments are streamed while they are generated"


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_error_is_the_last_chunk(server, says, failing, path, after):
    says(TEXTS["all"])
    failing(after)
    body = {"messages": MESSAGES, "max_tokens": 40} if "chat" in path else {"prompt": "a", "max_tokens": 40}
    *events, last = events_of(server, path, {**body, "stream_options": {"include_usage": True}})
    assert last["error"]["type"] == "server_error"
    assert "made to fail" not in json.dumps(last)
    assert not any("error" in event or event["usage"] for event in events)
    assert not any(choice["finish_reason"] for event in events for choice in event["choices"])
    client = server.client().chat if "chat" in path else server.client()
    with pytest.raises(openai.APIError, match="internal server error"):
        list(client.completions.create(model="tiny", stream=True, **body))


# Completions


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"logprobs": 1}, {"echo": True, "logprobs": 0}], ids=str)
def test_chunks_of_completions(server, says, tokenizer, more):
    text = "<think>a</think>b"
    says(text)
    ids = tokenizer(text)["input_ids"]
    for limit in (1, 2, 9, len(ids), len(ids) + 1):
        body = {"prompt": ["a", "bc"], "n": 2, "max_tokens": limit, **more}
        *events, last, done = events_of(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
        whole = server.post("/v1/completions", body).json()
        assert done == "[DONE]"
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], whole["usage"]["completion_tokens"])
        reason = "stop" if limit > len(ids) else "length"
        for choice in whole["choices"]:
            own = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
            begun = ["a", "bc"][choice["index"] // 2] if "echo" in more else ""
            assert "".join(part["text"] for part in own) == choice["text"] == begun + tokenizer.decode(ids[:limit])
            assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [reason]
            assert choice["finish_reason"] == reason
            if "logprobs" in more:
                for name in ("tokens", "text_offset"):
                    assert [one for part in own for one in part["logprobs"][name]] == choice["logprobs"][name]
                scores = [one for part in own for one in part["logprobs"]["token_logprobs"]]
                assert scores == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
        for event in events:
            (choice,) = event["choices"]
            assert event["usage"] is None
            shown = {**event, "choices": [{**choice, "finish_reason": "stop", "logprobs": None}]}
            Completion.model_validate(shown)


# Responses


def response_event_types(parts):
    """Return the event types of a response with these parts, deltas merged; without parts it has an empty message."""
    kinds = {"text": "output_text", "reasoning": "reasoning_text"}
    types = ["created", "in_progress"]
    for kind, text in parts or [("text", "")]:
        types.append("output_item.added")
        if kind == "call":
            types += ["function_call_arguments.delta"] * bool(text) + ["function_call_arguments.done"]
        else:
            deltas = [f"{kinds[kind]}.delta"] * bool(text)
            types += ["content_part.added", *deltas, f"{kinds[kind]}.done", "content_part.done"]
        types.append("output_item.done")
    return [f"response.{kind}" for kind in [*types, "completed"]]


def without_ids(item):
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def responses_body(limit):
    return {"input": "a", "tools": FLAT, "max_output_tokens": limit}


@pytest.mark.parametrize("name", thinned(reversed(TEXTS), 2))
def test_events_of_a_response(server, says, tokenizer, name):
    text = TEXTS[name]
    says(text)
    for limit, shown in limits(tokenizer, text):
        events = events_of(server, "/v1/responses", responses_body(limit))
        parts, reason = parts_of(shown), finish_reason_of(text, shown)
        assert merged_deltas(event["type"] for event in events) == response_event_types(parts)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            RESPONSE_EVENT.validate_python(event)
        final = events[-1]["response"]
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert final["output"] == items
        added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
        assert [(item["id"], item["type"]) for item in added] == [(item["id"], item["type"]) for item in items]
        shown_parts = [
            item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in items
        ]
        assert shown_parts == ([part for _, part in parts] or [""])
        for index, part in enumerate(shown_parts):
            own = [event for event in events if event.get("output_index") == index]
            deltas = [event["delta"] for event in own if event["type"].endswith(".delta")]
            assert (all(deltas), "".join(deltas)) == (True, part)
            (ended,) = (event for event in own if event["type"].endswith(("text.done", "arguments.done")))
            assert ended.get("text", ended.get("arguments")) == part
        reasoned = final["usage"]["output_tokens_details"]["reasoning_tokens"]
        thought = re.match(r"<think>(.*?)(</think>|$)", shown)
        fewest, most = (len(tokenizer(thought[group])["input_ids"]) if thought else 0 for group in (1, 0))
        assert fewest <= reasoned <= most
        status = "incomplete" if reason == "length" else "completed"
        assert final["status"] == items[-1]["status"] == status
        assert (final["completed_at"] is None) == (status == "incomplete")
        assert all(item["status"] == "completed" for item in items[:-1])
        whole = server.post("/v1/responses", responses_body(limit)).json()
        assert [without_ids(item) for item in whole["output"]] == [without_ids(item) for item in items]
        assert whole["usage"]["output_tokens"] == final["usage"]["output_tokens"]
        with server.client().responses.stream(model="tiny", **responses_body(limit)) as stream:
            assert merged_deltas(event.type for event in stream) == response_event_types(parts)
            assert stream.get_final_response().status == status


@pytest.mark.parametrize("after", [0, 3, 14])
def test_an_error_ends_a_response(server, says, failing, after):
    says(TEXTS["all"])
    failing(after)
    *events, error, failed = events_of(server, "/v1/responses", responses_body(40))
    for event in (*events, error, failed):
        RESPONSE_EVENT.validate_python(event)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert (error["type"], failed["type"], failed["response"]["status"]) == ("error", "response.failed", "failed")
    assert "made to fail" not in json.dumps([error, failed])
    assert failed["response"]["error"]["code"] == "server_error"
    numbers = [event["sequence_number"] for event in (*events, error, failed)]
    assert numbers == list(range(len(numbers)))
    ended = {"error", "response.failed", "response.completed", "response.incomplete"}
    assert not ended & {event["type"] for event in events}
    read = list(server.client().responses.create(model="tiny", stream=True, **responses_body(40)))
    assert [event.type for event in read[-2:]] == ["error", "response.failed"]


# Messages


def message_event_types(parts):
    """Return the event types of a message with these parts, deltas merged."""
    types = ["message_start"]
    for _, text in parts:
        types += ["content_block_start", *["content_block_delta"] * bool(text), "content_block_stop"]
    return [*types, "message_delta", "message_stop"]


def messages_body(limit):
    return {"messages": MESSAGES, "tools": ANTHROPIC, "max_tokens": limit}


@pytest.fixture(scope="module")
def anthropic():
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def claude(server, anthropic):
    """Anthropic's client, connected to the server."""
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def count_tokens(server):
    """Return the number of prompt tokens according to the counting endpoint."""
    body = {"messages": MESSAGES, "tools": ANTHROPIC}
    return server.post("/v1/messages/count_tokens", body).json()["input_tokens"]


@pytest.mark.parametrize("name", thinned(reversed(TEXTS), 2))
def test_events_of_a_message(server, anthropic, claude, says, tokenizer, name):
    message_event = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    text, kinds = TEXTS[name], {"text": "text", "reasoning": "thinking", "call": "tool_use"}
    says(text)
    reasons = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
    for limit, shown in limits(tokenizer, text):
        events = events_of(server, "/v1/messages", messages_body(limit))
        parts, reason = parts_of(shown), finish_reason_of(text, shown)
        assert merged_deltas(event["type"] for event in events) == message_event_types(parts)
        for event in events:
            message_event.validate_python(event)
        blocks = [event for event in events if event["type"] == "content_block_start"]
        assert [event["content_block"]["type"] for event in blocks] == [kinds[kind] for kind, _ in parts]
        for kind in ("content_block_start", "content_block_stop"):
            assert [event["index"] for event in events if event["type"] == kind] == list(range(len(parts)))
        for index, (_, part) in enumerate(parts):
            deltas = [event["delta"] for event in events if event.get("index") == index and "delta" in event]
            if parts[index][0] == "reasoning":
                assert deltas.pop() == {"type": "signature_delta", "signature": "unsigned"}  # clients drop an empty one
            own = [next(value for name, value in delta.items() if name != "type") for delta in deltas]
            assert (all(own), "".join(own)) == (True, part)
        assert events[-2]["delta"]["stop_reason"] == reasons[reason]
        started, ended = events[0]["message"]["usage"], events[-2]["usage"]
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        assert [started["output_tokens"], *(started[name] for name in names)] == [0, *(ended[name] for name in names)]
        assert ended["input_tokens"] + ended["cache_read_input_tokens"] == count_tokens(server)
        with claude.messages.stream(model="tiny", **messages_body(limit)) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == reasons[reason]
        assert [block.type for block in final.content] == [kinds[kind] for kind, _ in parts]
        whole = server.post("/v1/messages", messages_body(limit)).json()
        strip = {"id", "caller", "citations"}
        said = [{key: value for key, value in block.to_dict().items() if key not in strip} for block in final.content]
        assert [{key: value for key, value in block.items() if key != "id"} for block in whole["content"]] == said
        assert whole["stop_reason"] == reasons[reason]
        assert whole["usage"]["output_tokens"] == final.usage.output_tokens


@pytest.mark.parametrize("after", [0, 3, 14])
def test_an_error_ends_a_message(server, anthropic, claude, says, failing, after):
    says(TEXTS["all"])
    failing(after)
    first, *events, last = events_of(server, "/v1/messages", messages_body(40))
    assert (first["type"], last["type"]) == ("message_start", "error")
    assert not {"message_delta", "message_stop", "error"} & {event["type"] for event in events}
    assert "made to fail" not in json.dumps(last)
    with (
        pytest.raises(anthropic.APIError, match="internal server error"),
        claude.messages.stream(model="tiny", **messages_body(40)) as stream,
    ):
        stream.until_done()


# Steps


@pytest.mark.parametrize("name", thinned(TEXTS, 2))
def test_events_of_steps(server, says, tokenizer, name):
    text = TEXTS[name]
    says(text)
    ids = tokenizer(text)["input_ids"]
    for limit in (1, len(ids) // 2 + 1, len(ids) + 1):
        events = server.steps(prompt="a", max_tokens=limit)
        kinds = [kind for kind, _ in events]
        assert kinds == ["start", *["step"] * (len(events) - 2), "end"]
        assert [data["index"] for kind, data in events if kind == "step"] == list(range(len(events) - 2))
        seconds = [data["seconds"] for kind, data in events if kind == "step"]
        assert seconds == sorted({*seconds}), "measured from the end of the prefill"
        tokens = [token for kind, data in events if kind == "step" for token in data["tokens"]]
        assert tokens == [*ids, 0][:limit]
        shown = "".join("".join(data["texts"]) for kind, data in events if kind == "step") + events[-1][1]["text"]
        assert shown == tokenizer.decode(ids[:limit])
        assert events[-1][1]["finish_reason"] == ("stop" if limit > len(ids) else "length")


def test_an_error_ends_steps(server, says, failing):
    says(TEXTS["all"])
    failing(3)
    kinds = [kind for kind, _ in server.steps(prompt="a", max_tokens=40)]
    assert kinds[0] == "start"
    assert kinds[-1] == "error"
    assert not {"end", "error"} & set(kinds[:-1])
