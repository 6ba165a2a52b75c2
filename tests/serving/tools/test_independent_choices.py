"""Choices of a request, and concurrent requests, parse, stop and score their outputs independently.

The seed of a choice selects its text: reasoning, calls, a stop string or a malformed call. The reference is a separate
request of one choice with that seed.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.cases import thinned
from support.functions import TOOLS
from support.openai_answers import chat, completion, streamed_chat, streamed_completion
from transformers import LogitsProcessor

from token_recycling.serving import generation


def call(at):
    return f'<tool_call>{{"name": "look", "arguments": {json.dumps({"at": at})}}}</tool_call>'


TEXTS = [
    "Plain, and of several words.",
    "<think>so it is</think>Two.",
    f"Three{call(1)}",
    f"<think>both</think>{call(2)}{call(3)}",
    "Five: a stop here, and what follows.",
    'Six <tool_call>{"name": 5}</tool_call> is malformed.',
    'Seven <tool_call>{"name": "look", "argum',
]
N, STOP = 4, ["top h"]


class Sampled(LogitsProcessor):
    """Makes a model emit one of several texts; random numbers choose where the texts diverge."""

    def __init__(self, texts, prompt_tokens):
        self.texts, self.prompt_tokens = texts, prompt_tokens

    def __call__(self, input_ids, scores):
        said = input_ids[0, self.prompt_tokens :].tolist()
        forced = scores.new_full(scores.shape, float("-inf"))
        forced[0, [text[len(said)] for text in self.texts if text[: len(said)] == said]] = 0
        return forced


@pytest.fixture(autouse=True)
def scripted_texts(monkeypatch, tokenizer):
    usual = generation.processors
    texts = [[*tokenizer(text)["input_ids"], 0] for text in TEXTS]

    def sampled(wanted, *more):
        found = usual(wanted, *more)
        return type(found)([*found, Sampled(texts, wanted.ids.shape[-1])])

    monkeypatch.setattr(generation, "processors", sampled)


def request(seed, **more):
    return {"tools": TOOLS, "temperature": 1, "seed": seed, "max_tokens": 90, "logprobs": True, "stop": STOP, **more}


def shown(choice):
    """Return all of a choice except its index and the ids of its calls."""
    message = choice.message
    calls = [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]
    tokens = [one.token for one in choice.logprobs.content]
    thought = message.model_extra.get("reasoning_content")
    return choice.finish_reason, message.content, thought, calls, tokens


def streamed(events):
    """Return the same for every choice of a stream, by index."""
    found = {}
    for choice in (choice for event in events for choice in event.choices):
        one = found.setdefault(choice.index, {"text": "", "thought": "", "calls": [], "tokens": [], "reason": None})
        one["text"] += choice.delta.content or ""
        one["thought"] += choice.delta.model_extra.get("reasoning_content") or ""
        one["reason"] = choice.finish_reason or one["reason"]
        one["tokens"] += [entry.token for entry in choice.logprobs.content] if choice.logprobs else []
        for part in choice.delta.tool_calls or ():
            if part.function.name:
                one["calls"].append([part.function.name, ""])
            one["calls"][part.index][1] += part.function.arguments
    return [
        (one["reason"], one["text"], one["thought"], [tuple(call) for call in one["calls"]], one["tokens"])
        for _, one in sorted(found.items())
    ]


@pytest.mark.parametrize("seed", thinned([11, 6], 2))
def test_choices_of_a_chat_equal_separate_requests(server, seed):
    answers = [chat(server, **request(seed + choice)) for choice in range(N)]
    alone = [shown(answer.choices[0]) for answer in answers]
    assert len({str(one[1:]) for one in alone}) > 2
    together = chat(server, **request(seed), n=N)
    assert [shown(choice) for choice in together.choices] == alone
    assert together.usage.prompt_tokens == answers[0].usage.prompt_tokens
    assert together.usage.completion_tokens == sum(answer.usage.completion_tokens for answer in answers)
    reasoned = [answer.usage.completion_tokens_details.reasoning_tokens for answer in answers]
    assert together.usage.completion_tokens_details.reasoning_tokens == sum(reasoned) > max(reasoned)
    ids = [call.id for choice in together.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == len(ids)
    parts = [streamed(streamed_chat(server, **request(seed + choice)))[0] for choice in range(N)]
    assert streamed(streamed_chat(server, **request(seed), n=N)) == parts
    for part, whole in zip(parts, alone, strict=True):
        assert part == (whole[0], whole[1] or "", whole[2] or "", *whole[3:])


def test_choices_of_completions_equal_separate_requests(server):
    body = {"temperature": 1, "max_tokens": 90, "logprobs": 0, "stop": STOP}
    alone = [
        completion(server, prompt=prompt, seed=seed, **body).choices[0] for prompt in "ab" for seed in range(17, 17 + N)
    ]
    together = completion(server, prompt=["a", "b"], seed=17, n=N, **body).choices
    for one, other in zip(together, alone, strict=True):
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
        assert one.logprobs.tokens == other.logprobs.tokens
        assert one.logprobs.text_offset == other.logprobs.text_offset
        assert one.logprobs.token_logprobs == pytest.approx(other.logprobs.token_logprobs, abs=1e-4)
    texts = dict.fromkeys(range(2 * N), "")
    for event in streamed_completion(server, prompt=["a", "b"], seed=17, n=N, **body):
        texts[event.choices[0].index] += event.choices[0].text
    assert list(texts.values()) == [one.text for one in alone]
    assert any(one.text.startswith("Five") and one.text.endswith("a s") for one in alone)


def test_concurrent_requests_equal_separate_requests(server):
    """Whole and streamed chats with functions, and completions."""

    def plain(seed):
        return completion(server, prompt="a", temperature=1, seed=seed, max_tokens=60).choices[0].text

    def whole(seed):
        return shown(chat(server, **request(seed)).choices[0])

    def parts(seed):
        return streamed(streamed_chat(server, **request(seed, stop=[])))

    calls = [(kind, seed) for seed in range(17, 21) for kind in (plain, whole, parts)]
    alone = [kind(seed) for kind, seed in calls]
    with ThreadPoolExecutor(len(calls)) as threads:
        assert list(threads.map(lambda one: one[0](one[1]), calls)) == alone
