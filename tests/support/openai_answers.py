"""Server responses as types of the official client, validated by them; the client itself does not validate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.serving import Serving

MESSAGES = [{"role": "user", "content": "import os"}]


def completion(server: Serving, **body: Any) -> Completion:
    answer = _posted(server, "/v1/completions", {"prompt": "for index in", **body})
    Completion.model_validate({**answer, "choices": [_without_first(choice) for choice in answer["choices"]]})
    return Completion.construct(**answer)


def chat(server: Serving, **body: Any) -> ChatCompletion:
    return ChatCompletion.model_validate(_posted(server, "/v1/chat/completions", {"messages": MESSAGES, **body}))


def streamed_completion(server: Serving, **body: Any) -> list[Completion]:
    events = list(_events(server, "/v1/completions", {"prompt": "for index in", **body}))
    # The types lack events within a stream, whose `finish_reason` is null.
    for event in events:
        whole = [_without_first(choice) for choice in event["choices"]]
        whole = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in whole]
        Completion.model_validate({**event, "choices": whole})
    return [Completion.construct(**event) for event in events]


def streamed_chat(server: Serving, **body: Any) -> list[ChatCompletionChunk]:
    events = _events(server, "/v1/chat/completions", {"messages": MESSAGES, **body})
    return [ChatCompletionChunk.model_validate(event) for event in events]


def _without_first(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without the log-probability of a prompt's first token: null, which the types do not allow."""
    logprobs = choice["logprobs"]
    if not logprobs or logprobs["token_logprobs"][:1] != [None]:
        return choice
    return {**choice, "logprobs": {name: values and values[1:] for name, values in logprobs.items()}}


def _posted(server: Serving, path: str, body: dict[str, Any]) -> Any:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _events(server: Serving, path: str, body: dict[str, Any]) -> Iterator[Any]:
    answer = server.post(path, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        data = json.loads(event.removeprefix("data: "))
        assert "error" not in data, data
        yield data
