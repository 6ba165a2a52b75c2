"""`POST /v1/chat/completions`: messages rendered with the chat template, outputs with reasoning and tool calls."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from ..engine import Engine, Job
from ..errors import ApiError, warn_ignored
from ..generation import Generation
from ..logprobs import chat_logprobs
from ..output import Delta, Piece
from ..prompt import needs_prompted_tools, parts_constraint, render_prompt, response_parser, with_prompted_tools
from ..protocol import ChatRequest
from .common import ChoicesReply, Event, generation_of, output_of

PREFIX = "chatcmpl-"


class ChatReply(ChoicesReply):
    """Choices, each a message."""

    kind, kind_of_event = "chat.completion", "chat.completion.chunk"

    def __init__(self, engine: Engine, job: Job, body: ChatRequest, generation: Generation) -> None:
        super().__init__(engine, job, body, [generation])
        self._logprobs = bool(body.logprobs)

    def begin(self) -> Iterable[Event]:
        for index in range(self.generations[0].n):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
            yield self._event([{**choice, "finish_reason": None, "logprobs": None}])

    def push(self, index: int, delta: Delta) -> Iterable[Event]:
        message: dict[str, Any] = {}
        if text := delta.of("text"):
            message["content"] = text
        if reasoning := delta.of("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := delta.calls:
            message["tool_calls"] = [{"index": call.index, **_part_of_call(call)} for call in calls]
        if message or delta.finish_reason or (delta.tokens and self._logprobs):
            yield self._event([{"index": index, "delta": message, **self._about_end(delta)}])

    def _choice(self, index: int, output: Delta) -> dict[str, Any]:
        text = output.of("text")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := output.of("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := output.calls:
            message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
        return {"index": index, "message": message, **self._about_end(output)}

    def _about_end(self, delta: Delta) -> dict[str, Any]:
        scores = chat_logprobs(self._tokenizer, delta.tokens) if self._logprobs else None
        return {"finish_reason": delta.finish_reason, "logprobs": scores}


def _call(call: Piece) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


def _part_of_call(call: Piece) -> dict[str, Any]:
    return {"function": {"arguments": call.text}} if call.name is None else _call(call)


async def prepare(engine: Engine, body: ChatRequest, job: Job) -> ChatReply:
    """Return the response to a request; raise ApiError."""
    return ChatReply(engine, job, body, await chat_generation(engine, body, job))


async def chat_generation(engine: Engine, body: ChatRequest, job: Job) -> Generation:
    """Return the generation that a chat asks for; raise ApiError."""
    loaded, tools = engine.loaded, body.shown_tools
    ids, prompted = await prompt_of(engine, body)
    constraint, parser = parts_constraint(loaded, body, ids, prompted), None
    if constraint is not None or body.constraint is None:  # else delimiters are text, such as in a JSON string
        parser = response_parser(loaded, ids, tools, prompted and tools is not None, constraint is not None)
    return await generation_of(
        engine,
        job,
        body,
        ids,
        partial(output_of, loaded.tokenizer, body, ids if body.continue_final_message else None, new_parser=parser),
        field="messages",
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prediction=None if body.prediction is None else body.prediction.text,
        constraint=constraint,
    )


async def prompt_of(engine: Engine, body: ChatRequest) -> tuple[torch.Tensor, bool]:
    """Return the prompt of a chat (1, length), and whether its tools are prompted; raise ApiError."""
    tokenizer, messages, tools = engine.loaded.tokenizer, body.messages, body.shown_tools
    if not getattr(tokenizer, "chat_template", None):
        message = (
            "the model has no chat template, so messages cannot be rendered; use /v1/completions, or start the server "
            "with --chat-template"
        )
        raise ApiError(400, message, "no_chat_template", "messages")
    prompted = needs_prompted_tools(engine.loaded, body)
    if prompted:
        messages, tools = with_prompted_tools(tokenizer, messages, tools), None
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        if re.search(r"\breasoning_effort\b", tokenizer.get_chat_template(tools=tools)):
            variables = {"reasoning_effort": body.reasoning_effort, **variables}
        else:
            warn_ignored("reasoning_effort")
    render = partial(
        render_prompt,
        tokenizer,
        messages,
        continue_final=bool(body.continue_final_message),
        add_prompt=body.add_generation_prompt is not False,
        tools=tools,
        variables=variables,
    )
    return await asyncio.to_thread(render), prompted
