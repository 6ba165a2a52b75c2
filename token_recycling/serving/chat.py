"""`POST /v1/chat/completions`: messages through the chat template, and outputs with reasoning and tool calls.

`ChatAnswer` is also the base of the answers of /v1/responses and /v1/messages, which state the same in other forms.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .completions import CompletionAnswer
from .job import Job
from .logprobs import chat_logprobs
from .output import Delta, Output, Piece
from .protocol import ChatRequest, warn_ignored
from .sequences import sequences_of
from .service import Service
from .templates import render_prompt, response_parser
from .tools import calls_form, needs_prompted_tools, with_prompted_tools


@dataclass
class Prompt:
    """A chat as token ids (1, length)."""

    ids: torch.Tensor
    prompted: bool
    """Whether it says in words how functions are called."""


async def prompt_of(service: Service, body: ChatRequest) -> Prompt:
    """Render a chat with its template; raise ApiError, and what the template raises."""
    service.check_chat()
    tokenizer, messages, tools = service.loaded.tokenizer, body.messages, body.shown_tools
    words = needs_prompted_tools(service.loaded, body)
    if words:
        messages, tools = with_prompted_tools(tokenizer, messages, tools), None
    variables = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        if re.search(r"\breasoning_effort\b", tokenizer.get_chat_template(tools=tools)):
            variables = {"reasoning_effort": body.reasoning_effort, **variables}
        else:
            warn_ignored("reasoning_effort")
    ends = {"continue_final": bool(body.continue_final_message), "add_prompt": body.add_generation_prompt is not False}
    ids = await asyncio.to_thread(render_prompt, tokenizer, messages, **ends, tools=tools, variables=variables)
    return Prompt(ids, words)


@dataclass
class ChatAnswer(CompletionAnswer):
    """The answer of /v1/chat/completions."""

    prefix = "chatcmpl-"
    kind, streamed_kind = "chat.completion", "chat.completion.chunk"

    @classmethod
    async def prepare(cls, service: Service, body: ChatRequest, job: Job) -> ChatAnswer:  # type: ignore[override]
        prompt = await prompt_of(service, body)
        top = (body.top_logprobs or 0) if body.logprobs else None
        form = calls_form(service.loaded, body, prompt.ids, prompt.prompted)
        sequences, config = await sequences_of(service, job, prompt.ids, body, None, top, form)
        tools = body.shown_tools
        parser = response_parser(service.loaded, prompt.ids, tools, prompt.prompted and tools is not None)
        new_choice = partial(
            Output,
            service.loaded.tokenizer,
            config,
            parser,
            hidden=body.stop_token_ids,
            streamed=bool(body.stream),
            include_stop=bool(body.include_stop_str_in_output),
        )
        return cls(service, job, sequences, [new_choice() for _ in sequences], top, body.wants_usage)

    def opened(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {}
        if text := delta.of("text"):
            message["content"] = text
        if reasoning := delta.of("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := delta.calls:
            message["tool_calls"] = [_call_part(call) for call in calls]
        return {"delta": message, "logprobs": self._logprobs(delta)}

    def choice(self, delta: Delta) -> dict[str, Any]:
        text = delta.of("text")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := delta.of("reasoning"):
            message["reasoning_content"] = reasoning
        if calls := delta.calls:
            message |= {"content": text or None, "tool_calls": [_call(call) for call in calls]}
        return {"message": message, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if self.top is None else chat_logprobs(self.service.loaded.tokenizer, delta.tokens, delta.offsets)


def _call(call: Piece) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.text}}


def _call_part(call: Piece) -> dict[str, Any]:
    more = {"function": {"arguments": call.text}} if call.name is None else _call(call)
    return {"index": call.index, **more}
