"""Code shared by all APIs: converts a request body into a `Generation`, and sends a response, streamed or whole.

Each API is a module with the interface `Api`. Its `Reply` has the generations of a request, and formats their deltas as
events or their outputs as one response.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase

from ...model.inspection import context_length, vocabulary_size
from ..engine import Engine, Job
from ..errors import ApiError, CancelledError, failure, invalid
from ..generation import Generation
from ..grammars import new_processor
from ..output import Delta, Kind, Output, Piece, whole
from ..protocol import ChoicesRequest, Constraint, Request

Event = tuple[str, Any]
"""Name, empty if the API has no event names, and data, None for the end of OpenAI's streams."""
_PING = 15.0
"""Seconds between comments in an idle stream: clients and proxies close silent connections."""
_SEND_TIMEOUT = 30.0
"""Seconds after which a stream ends if its client reads nothing."""
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}
"""Escaped in events, since some clients treat these characters as line ends."""
_CONTEXT = 8
"""Number of prompt tokens on which the text of the first output token may depend."""
_LONGEST = 1024
"""Maximum output tokens if neither the request nor the model's context sets a limit."""


class Reply(Protocol):
    """The response to a request in the format of an API."""

    generations: list[Generation]

    def begin(self) -> Iterable[Event]:
        """Return the events before the first token."""
        ...

    def push(self, index: int, delta: Delta) -> Iterable[Event]:
        """Return the events of a delta of an output."""
        ...

    def end(self, usage: dict[str, Any]) -> Iterable[Event]:
        """Return the events after the last token."""
        ...

    def fail(self, error: dict[str, Any]) -> Iterable[Event]:
        """Return the events that end a stream with an error, given in OpenAI's format."""
        ...

    def whole(self, outputs: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a response that is not streamed."""
        ...


class Api(Protocol):
    """A module that serves an API."""

    PREFIX: str
    """Prefix of the ids of its responses."""

    async def prepare(self, engine: Engine, body: Any, job: Job) -> Reply:
        """Return the response to a request; raise ApiError."""
        ...


# Streams and whole responses


async def events_of(engine: Engine, job: Job, reply: Reply) -> AsyncGenerator[bytes]:
    """Yield a response as server-sent events. An error is reported in the last events."""
    try:
        for event in reply.begin():
            yield written(*event)
        async with contextlib.aclosing(engine.generate(job, reply.generations)) as deltas:
            async for index, delta in deltas:
                for event in reply.push(index, delta):
                    yield written(*event)
        for event in reply.end(job.usage()):
            yield written(*event)
    except CancelledError:
        return
    except Exception as error:
        for event in reply.fail(failure(error)):
            yield written(*event)


async def whole_of(engine: Engine, job: Job, reply: Reply) -> dict[str, Any]:
    """Return a whole response; raise the errors of the generation."""
    deltas: list[list[Delta]] = [[] for generation in reply.generations for _ in range(generation.n)]
    async with contextlib.aclosing(engine.generate(job, reply.generations)) as arrivals:
        async for index, delta in arrivals:
            deltas[index].append(delta)
    return reply.whole([whole(output) for output in deltas], job.usage())


def written(name: str, data: Any) -> bytes:
    """Return a server-sent event."""
    text = "[DONE]" if data is None else json.dumps(data, ensure_ascii=False).translate(_LINE_ENDS)
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()


# At shutdown, streams may finish within the grace period; then the engine ends them.
AppStatus.disable_automatic_graceful_drain()


class EventStream(EventSourceResponse):
    """Server-sent events of a job, with comments while the stream is idle. The job ends with the stream."""

    def __init__(self, job: Job, events: AsyncGenerator[bytes], headers: dict[str, str]) -> None:
        self._job = job
        super().__init__(
            events,
            headers={**headers, "Cache-Control": "no-cache"},
            ping=_PING,
            ping_message_factory=lambda: ServerSentEvent(comment="keep-alive", sep="\n"),
            sep="\n",
            send_timeout=_SEND_TIMEOUT,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:  # the client reads nothing
            pass
        finally:
            self._job.cancel()


# Shared parts of replies


class ChoicesReply:
    """Choices, in the format of chats and completions."""

    kind: ClassVar[str]
    """The field `object` of a whole response."""
    kind_of_event: ClassVar[str]
    """The field `object` of an event."""

    def __init__(self, engine: Engine, job: Job, body: ChoicesRequest, generations: list[Generation]) -> None:
        self.generations, self._tokenizer = generations, engine.loaded.tokenizer
        self._wants_usage = body.wants_usage
        self._about = {"id": job.id, "created": int(time.time()), "model": engine.settings.name}

    def end(self, usage: dict[str, Any]) -> Iterable[Event]:
        """Return the events after the last token."""
        if self._wants_usage:
            yield self._event([], usage)
        yield "", None

    def fail(self, error: dict[str, Any]) -> Iterable[Event]:
        """Return the event that ends a stream with an error."""
        return [("", error)]

    def whole(self, outputs: list[Delta], usage: dict[str, Any]) -> dict[str, Any]:
        """Return a response that is not streamed."""
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return {**self._about, "object": self.kind, "choices": choices, "usage": usage}

    def _choice(self, index: int, output: Delta) -> dict[str, Any]:
        """Return a whole output as a choice."""
        raise NotImplementedError

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> Event:
        counted = {"usage": usage} if self._wants_usage else {}
        return "", {**self._about, "object": self.kind_of_event, "choices": choices, **counted}


class Parts:
    """The parts of an output, built incrementally: text, reasoning and calls, in order. Each API has its own objects
    for them, and events for their start, growth and end.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        """The parts in the API's format."""
        self._kind: Kind | None = None
        """Kind of the last part while it is open, else None."""
        self._texts: list[str] = []
        """The text or arguments of the open part, in pieces."""

    def push(self, delta: Delta) -> Iterator[Event]:
        """Add a delta; yield its events."""
        for piece in delta.pieces:
            if piece.name is not None or piece.kind != self._kind:
                yield from self.begin(piece)
            if piece.text:
                self._texts.append(piece.text)
                yield self._growth(piece.kind, piece.text)

    def begin(self, piece: Piece) -> Iterator[Event]:
        """End the open part, and begin the part of a piece without its text."""
        yield from self.end()
        self._kind = piece.kind
        yield from self._beginning(piece)

    def end(self, status: str = "completed") -> Iterator[Event]:
        """End the open part, if any."""
        if self._kind is not None:
            kind, text = self._kind, "".join(self._texts)
            self._kind = None
            self._texts.clear()
            yield from self._ending(kind, text, status)

    def _beginning(self, piece: Piece) -> Iterator[Event]:
        """Add an item for the part of a piece."""
        raise NotImplementedError

    def _growth(self, kind: Kind, text: str) -> Event:
        """Return the event for text added to the last item."""
        raise NotImplementedError

    def _ending(self, kind: Kind, text: str, status: str) -> Iterator[Event]:
        """Complete the last item with its whole text."""
        raise NotImplementedError


# From a body to a generation


def output_of(
    tokenizer: PreTrainedTokenizerBase,
    body: Request,
    continued: torch.Tensor | None,
    config: GenerationConfig,
    new_parser: Callable[[], Any] | None = None,
) -> Output:
    """Return the reader of an output with the options of a body. `continued`: the prompt (1, length) if the output
    continues its text; `new_parser` creates the parser of the output's parts.
    """
    before = [] if continued is None else continued[0, -_CONTEXT:].tolist()
    include_stop = bool(body.include_stop_str_in_output)
    return Output(tokenizer, config, new_parser, include_stop, before)


async def generation_of(
    engine: Engine,
    job: Job,
    body: Request,
    ids: torch.Tensor,
    new_output: Callable[[GenerationConfig], Output],
    *,
    field: str,
    n: int | None = None,
    default_tokens: int | None = None,
    logprobs: int | None = None,
    scores_prompt: bool = False,
    prediction: str | None = None,
    constraint: Constraint | None = None,
) -> Generation:
    """Return the generation that a body asks for after a prompt (1, length); raise ApiError.

    `field`: name of the prompt's field; `default_tokens`: maximum output tokens if the body sets none, None for the
    context length; `constraint` replaces the body's own output format.
    """
    config = config_of(body, engine, default_tokens)
    _limit(engine, job, ids.shape[-1], config, field)
    check_ids(engine, int(ids.max()), field)
    _check_bias(body, engine.target.vocab_size)
    drafts = body.speculation is None or body.speculation.enabled
    predicted = None
    if prediction is not None and drafts:
        predicted = await asyncio.to_thread(_predicted, engine, prediction)
        job.predicted_tokens += len(predicted) * (n or 1)
    return Generation(
        ids=ids,
        config=config,
        new_output=partial(new_output, config),
        n=n or 1,
        seed=None if body.seed == -1 else body.seed,
        frequency_penalty=body.frequency_penalty or 0,
        presence_penalty=body.presence_penalty or 0,
        bias=body.bias,
        new_grammar=await _grammar(engine, job, body, constraint or body.constraint),
        logprobs=logprobs,
        scores_prompt=scores_prompt,
        prediction=predicted,
        nodes=None if body.speculation is None else body.speculation.nodes,
        reuse=body.cache_prompt is not False,
    )


def config_of(body: Request, engine: Engine, default_tokens: int | None = None) -> GenerationConfig:
    """Return the generation configuration of a request; raise ApiError. Fields that the request omits keep the values
    of the model's own configuration, except transformers' default `top_k` of 50.
    """
    model = engine.loaded.model
    config = copy.deepcopy(model.generation_config)
    config.top_k = config.top_k or 0
    config.max_new_tokens = default_tokens or context_length(model) or _LONGEST
    requested = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "stop_strings": body.stop or None,
        "max_new_tokens": body.limit,
        "min_new_tokens": body.min_tokens,
    }
    for name, value in requested.items():
        if value is not None:
            setattr(config, name, value)
    config.eos_token_id = body.ends(config.eos_token_id, vocabulary_size(model))
    stops = config.stop_strings
    config.stop_strings = [stops] if isinstance(stops, str) else stops or None
    if body.temperature == 0:
        config.do_sample = False
    elif body.temperature or body.top_p is not None:
        config.do_sample = True
    if not config.do_sample:
        config.temperature = config.top_p = config.top_k = config.min_p = None
    return config


def _limit(engine: Engine, job: Job, length: int, config: GenerationConfig, field: str) -> None:
    """Count a prompt of this length, and limit `config.max_new_tokens`. Raise ApiError, about the prompt's `field`, if
    the prompt is empty or too long, or if `min_new_tokens` does not fit.
    """
    job.prompt_tokens += length
    settings, context = engine.settings, engine.loaded.context
    if not length:
        raise ApiError(400, f"{field}: the prompt must have at least one token, got 0", "empty_prompt", field)
    output = 1 if config.max_new_tokens else 0
    limits = [settings.max_prompt_tokens, None if context is None else context - output]
    longest = min((limit for limit in limits if limit is not None), default=length)
    if length > longest:
        # litellm and langchain recognize the error by OpenAI's and Anthropic's wording.
        message = (
            f"{field}: prompt is too long: {length} tokens > {longest} maximum; shorten it. This model's maximum "
            f"context length is {context or longest} tokens, and the prompt may have {longest} of them."
        )
        raise ApiError(400, message, "context_length_exceeded", field)
    limits = [config.max_new_tokens, settings.max_new_tokens, None if context is None else context - length]
    config.max_new_tokens = min(limit for limit in limits if limit is not None)
    if (config.min_new_tokens or 0) > config.max_new_tokens:
        fits = f"{config.max_new_tokens}, the number of tokens that fit"
        raise invalid("min_tokens", f"must be <= {fits}, got {config.min_new_tokens}")


def check_ids(engine: Engine, largest: int, field: str) -> None:
    """Raise ApiError for a token that the model does not embed: some tokenizers have more tokens than their model."""
    if largest >= engine.target.embedded:
        raise invalid(field, f"token ids must be < {engine.target.embedded}, got {largest}")


def _check_bias(body: Request, vocabulary: int) -> None:
    if (largest := max(map(int, body.logit_bias or ()), default=0)) >= vocabulary:
        raise invalid("logit_bias", f"token ids must be < {vocabulary}, got {largest}")


def _predicted(engine: Engine, text: str) -> torch.Tensor:
    """Return the tokens of a prediction; raise ApiError if the drafter does not use predictions."""
    if not engine.pool.base.traits.predictions:
        raise invalid(
            "prediction",
            f"the server's drafter, {engine.pool.base.name}, does not use predictions; start the server with "
            "--drafter recycling, or omit prediction",
        )
    ids = engine.loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
    return ids[ids < engine.target.vocab_size].long()


async def _grammar(
    engine: Engine, job: Job, body: Request, constraint: Constraint | None
) -> Callable[[], LogitsProcessor] | None:
    """Return a function that creates the processor of a constraint; None for no constraint. Raise ApiError."""
    if constraint is None:
        return None
    field, form = constraint
    for name, value in (("min_tokens", body.min_tokens), ("ignore_eos", body.ignore_eos)):
        if value:
            why = f"cannot be combined with {field}: the output ends where its format ends; omit one of them"
            raise invalid(name, why)
    grammar = await engine.grammars.grammar(field, form, job.key, lambda: job.cancelled)
    job.unenforced += grammar.unenforced
    return new_processor(grammar, field)
