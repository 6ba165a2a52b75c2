"""`POST /v1/token_recycling/steps`: a text step by step, as it is generated, with the draft tree of each step.

The same API key, limits, isolation and cancellation as every other request. The body is JSON:

| field | meaning |
|---|---|
| `prompt` or `messages` | a text to continue, or a chat, for which the chat template is used |
| `drafter` | `accelerated` (default): the server's; `untrained`: a new one; `plain`: none; one of `--offer` |
| `response_format` | as in /v1/chat/completions |
| `max_tokens`, `seed`, `stop`, and all that says how tokens are chosen | as in /v1/chat/completions |

The answer is a stream of server-sent events, each with a name and JSON:

    event: start   {"id", "model", "prompt_tokens"}
    event: step    {"index", "seconds", "tokens", "texts", "accepted", "path", "forced",
                    "draft": {"parents", "tokens", "texts"}}
    event: end     {"text", "finish_reason", "usage"}
    event: error   {"error": {"message", "type", "param", "code"}}

`start` comes at once, while the request may still wait for its turn. `seconds` counts from the end of the prefill, so
that it is comparable between drafters. `tokens` are the ids that the step emitted and `texts` what each adds to the
text, nothing while a character is not complete: put together, with the `text` of `end`, they are the whole text. The
first `accepted` of them were drafted; the others, one as a rule, are the model's own. `draft` is the tree: of every
node the parent (-1 for the root, which is the newest token of the text before), the token and its text; `path` names
the accepted nodes, the root first; `forced` says of each token whether its grammar left no choice of characters.
`usage` is that of /v1/completions. The last event is `end` or `error`. A client that disconnects ends the generation.
What is refused before the stream begins (401, 400, 413, 429, 503) is answered with that status and the JSON of `error`.
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
from ...model.target import Target
from ...trees.draft import Context, Draft, Step
from ..conversation import Message
from ..engine import Engine, Job
from ..errors import CancelledError, failure, invalid
from ..generation import Generation
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
    """Return what a request asks to be generated; raise ApiError."""
    tokenizer = engine.loaded.tokenizer
    if body.messages is not None:
        field, (ids, _) = "messages", await prompt_of(engine, ChatRequest.model_validate({"messages": body.messages}))
    else:
        field, ids = "prompt", (await asyncio.to_thread(tokenizer, body.prompt, return_tensors="pt"))["input_ids"]
    return await generation_of(engine, job, body, ids, partial(output_of, tokenizer, body), field=field)


async def events_of(engine: Engine, job: Job, generation: Generation) -> AsyncGenerator[bytes]:
    """Yield the steps as server-sent events; an error ends them with an event that says so."""
    tokenizer, index = engine.loaded.tokenizer, 0
    unreported = deque[Delta]()
    try:
        yield written("start", {"id": job.id, "model": engine.settings.name, "prompt_tokens": job.prompt_tokens})
        report = partial(_reported, unreported)
        async with contextlib.aclosing(engine.steps(job, generation, report, unreported.extend)) as steps:
            async for step in steps:
                step["draft"]["texts"] = [tokenizer.decode([token]) for token in step["draft"]["tokens"]]
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
        # A step that an error ended was not delivered.
        texts = [unreported.popleft().of("text") for _ in step.tokens if unreported]
        put({**_plain_values(step, seconds), "texts": texts})

    return StepReporter(drafter, report)


def _plain_values(step: Step, seconds: float) -> dict[str, Any]:
    """Return the data of a step event as plain values: the logits must not be kept alive."""
    return {
        "seconds": round(seconds, 6),
        "tokens": step.tokens,
        "accepted": len(step.accepted) - 1,
        "path": step.accepted,
        "draft": {"parents": step.draft.parents.tolist(), "tokens": step.draft.tokens.tolist()},
        "forced": _forced(step),
    }


class StepReporter(Drafter):
    """Wraps a drafter: calls `on_step` with every step that it has learned from, and the seconds since the prompt was
    read.
    """

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
    """Return for each emitted token whether the grammar allowed no other."""
    state, forced = None if step.grammar_states is None else step.grammar_states[0], []
    for token in step.tokens:
        forced.append(state is not None and (state.single or bool(state.forced)))
        state = None if state is None else state.after(token)
    return forced
