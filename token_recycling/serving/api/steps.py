"""`POST /v1/token_recycling/steps`: an output streamed step by step, with the draft tree of each step.

API key, limits, isolation and cancellation are those of all other requests. The body is JSON:

| field | meaning |
|---|---|
| `prompt` or `messages` | a text to continue, or a chat, rendered with the chat template |
| `drafter` | `accelerated` (default): the server's; `untrained`: a new copy; `plain`: none; or one of `--offer` |
| `response_format` | as in /v1/chat/completions |
| `max_tokens`, `seed`, `stop`, and all sampling parameters | as in /v1/chat/completions |

The response is a stream of server-sent events, each with a name and JSON data:

    event: start   {"id", "model", "prompt_tokens"}
    event: step    {"index", "seconds", "tokens", "texts", "accepted", "path", "forced",
                    "draft": {"parents", "tokens", "texts"}}
    event: end     {"text", "finish_reason", "usage"}
    event: error   {"error": {"message", "type", "param", "code"}}

`start` is sent immediately, even while the request is queued. `seconds` counts from the end of the prefill, so that
drafters can be compared. `tokens` are the ids that the step emitted, and `texts` the text that each token adds, empty
while a character is incomplete. All `texts`, followed by the `text` of `end`, are the whole output. The first
`accepted` tokens were drafted; the others, usually one, are the model's own. `draft` has the parent of every node (-1
for the root, the newest token before the step), its token and its text. `path` lists the accepted nodes, the root
first. `forced` has a flag per token: whether the grammar left no choice of characters. `usage` is that of
/v1/completions. The last event is `end` or `error`. Disconnecting ends the generation. A request that is rejected
before the stream begins gets a status (400, 401, 413, 429, 503) and the JSON of `error`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import partial
from typing import Any

import torch
from pydantic import Field, model_validator

from ...drafters._base import Drafter, DrafterTraits, SequenceDrafter
from ...model.prefixes import Prefixes
from ...model.target import Target
from ...trees.draft import Context, Draft, Step
from ..conversation import Message
from ..engine import Engine, Job
from ..errors import CancelledError, failure, invalid
from ..generation import Generation
from ..logprobs import token_text
from ..output import Delta, whole
from ..protocol import ChatRequest, NonemptyText, Request, TokenLimit
from .chat import prompt_of
from .common import generation_of, output_of, written

PREFIX = "steps-"
OnStep = Callable[[Step, float], None]


class StepsRequest(Request):
    """`POST /v1/token_recycling/steps`: the prompt as text, or as the messages of a chat."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    max_tokens: TokenLimit | None = Field(None, description="Maximum number of output tokens.")
    drafter: NonemptyText = "accelerated"

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @model_validator(mode="after")
    def _one_prompt(self) -> StepsRequest:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "exactly one of prompt and messages is needed")
        return self


async def prepare(engine: Engine, body: StepsRequest, job: Job) -> Generation:
    """Return the generation that a request asks for; raise ApiError."""
    tokenizer = engine.loaded.tokenizer
    if body.messages is not None:
        field, continued = "messages", None
        ids, _ = await prompt_of(engine, ChatRequest.model_validate({"messages": body.messages}))
    else:
        field, ids = "prompt", (await asyncio.to_thread(tokenizer, body.prompt, return_tensors="pt"))["input_ids"]
        continued = ids
    return await generation_of(engine, job, body, ids, partial(output_of, tokenizer, body, continued), field=field)


async def events_of(engine: Engine, job: Job, generation: Generation) -> AsyncGenerator[bytes]:
    """Yield the steps as server-sent events. An error is reported in the last event."""
    tokenizer, index = engine.loaded.tokenizer, 0
    unreported = deque[Delta]()
    try:
        yield written("start", {"id": job.id, "model": engine.settings.name, "prompt_tokens": job.prompt_tokens})
        report = partial(_reported, unreported)
        async with contextlib.aclosing(engine.steps(job, generation, report, unreported.extend)) as steps:
            async for step in steps:
                step["draft"]["texts"] = [token_text(tokenizer, token) for token in step["draft"]["tokens"]]
                yield written("step", {"index": index, **step})
                index += 1
        rest = whole(unreported)
        ending = {"text": rest.of("text"), "finish_reason": rest.finish_reason, "usage": job.usage()}
        yield written("end", ending)
    except CancelledError:
        return
    except Exception as error:
        yield written("error", failure(error))


def _reported(unreported: deque[Delta], drafter: Drafter, put: Callable[[dict[str, Any]], None]) -> Drafter:
    def report(step: Step, seconds: float) -> None:
        # The tokens of a step that an error ended were not delivered.
        texts = [unreported.popleft().of("text") for _ in step.tokens if unreported]
        put({**_plain_values(step, seconds), "texts": texts})

    return StepReporter(drafter, report)


def _plain_values(step: Step, seconds: float) -> dict[str, Any]:
    """Return the data of a step event as plain values, so that the step's logits are freed."""
    return {
        "seconds": round(seconds, 6),
        "tokens": step.tokens,
        "accepted": len(step.accepted) - 1,
        "path": step.accepted,
        "draft": {"parents": step.draft.parents.tolist(), "tokens": step.draft.tokens.tolist()},
        "forced": _forced(step),
    }


class StepReporter(Drafter):
    """Wraps a drafter, and calls `on_step` with every observed step and the seconds since the end of the prefill."""

    def __init__(self, inner: Drafter, on_step: OnStep) -> None:
        self._inner, self._on_step = inner, on_step

    @property
    def traits(self) -> DrafterTraits:
        return self._inner.traits

    def start(self, prompt: torch.Tensor, target: Target) -> SequenceDrafter:
        return _ReportedText(self._inner.start(prompt, target), self._on_step)

    def describe(self) -> str:
        return self._inner.describe()


class _ReportedText(SequenceDrafter):
    """One sequence of a wrapped drafter."""

    def __init__(self, inner: SequenceDrafter, on_step: OnStep) -> None:
        super().__init__(inner.drafter)
        self._inner, self._on_step, self.pass_cost = inner, on_step, inner.pass_cost
        self._since: float | None = None

    def predict(self, tokens: torch.Tensor) -> None:
        self._inner.predict(tokens)

    def use_prefixes(self, prefixes: Prefixes) -> None:
        self._inner.use_prefixes(prefixes)

    def read_prompt(self, states: torch.Tensor) -> None:
        self._inner.read_prompt(states)

    def draft(self, context: Context) -> Draft:
        if self._since is None:
            self._since = time.perf_counter()
        return self._inner.draft(context)

    def observe(self, step: Step) -> None:
        self._inner.observe(step)
        since = time.perf_counter() if self._since is None else self._since
        self._on_step(step, time.perf_counter() - since)

    def statistics(self) -> Mapping[str, float]:
        return self._inner.statistics()

    def describe(self) -> str:
        return self._inner.describe()


def _forced(step: Step) -> list[bool]:
    """Return for each emitted token whether the grammar left no choice of characters."""
    state, forced = None if step.grammar_states is None else step.grammar_states[0], []
    for token in step.tokens:
        forced.append(state is not None and (state.single or bool(state.forced)))
        state = None if state is None else state.after(token)
    return forced
