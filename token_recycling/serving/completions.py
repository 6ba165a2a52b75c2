"""`POST /v1/completions` and `POST /v1/chat/completions`: from a body to texts, and what is said of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .answers import Answer, Event
from .calls import held_calls
from .choices import Choice, Delta
from .errors import ApiError, invalid
from .job import Job, Text
from .logprobs import of_chat, of_completion
from .requests import ChatBody, TextBody
from .service import Service
from .templates import rendered, response_parser
from .tools import in_words, told

_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""


@dataclass
class TextAnswer(Answer):
    """The answer of /v1/completions."""

    top: int | None = None
    """The likeliest tokens that are wanted for each token; None: no log-probabilities."""
    include_usage: bool = False

    prefix = "cmpl-"
    kind = streamed_kind = "text_completion"

    def __post_init__(self) -> None:
        self._said = [Delta() for _ in self.choices]
        self._reasons: list[str | None] = [None] * len(self.choices)

    @classmethod
    async def prepare(cls, service: Service, body: TextBody, job: Job) -> TextAnswer:
        tokenizer, texts, choices = service.loaded.tokenizer, list[Text](), list[Choice]()
        for prompt in body.prompts:
            ids = await asyncio.to_thread(_ids, service, prompt)
            made, config = await service.texts(job, ids, body, _DEFAULT_TOKENS, body.logprobs)
            for text in made:
                texts.append(text)
                choices.append(Choice(tokenizer, config, hidden=body.stop_token_ids))
                if body.echo:
                    shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
                    text.scored_prompt = body.logprobs
                    choices[-1].begin_with(shown, scored=body.logprobs is not None)
        return cls(service, job, texts, choices, body.logprobs, body.wants_usage)

    async def events(self) -> AsyncGenerator[Event]:
        for index in range(len(self.choices)):
            if (opened := self.opened()) is not None:
                yield self._event([{"index": index, "finish_reason": None, **opened}])
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for index, delta, reason in deltas:
                if delta or reason:
                    said = self.part(delta, len(self._said[index].calls))
                    yield self._event([{"index": index, "finish_reason": reason, **said}])
                self._said[index] += delta
                self._reasons[index] = reason
        if self.include_usage:
            yield self._event([], usage=self.usage())
        yield "", None

    def whole(self) -> dict[str, Any]:
        choices = [
            {"index": index, "finish_reason": reason, **self.choice(delta)}
            for index, (delta, reason) in enumerate(zip(self._said, self._reasons, strict=True))
        ]
        return {**self._body(self.kind, choices), "usage": self.usage()}

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> Event:
        usage = {"usage": None} if self.include_usage else {}
        return "", {**self._body(self.streamed_kind, choices), **usage, **more}

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        about = {"id": self.job.id, "object": kind, "created": self.created, "model": self.service.settings.name}
        return {**about, "choices": choices}

    def opened(self) -> dict[str, Any] | None:
        """What a choice says in a stream before its text."""
        return None

    def part(self, delta: Delta, calls: int) -> dict[str, Any]:
        """A part of a choice in a stream; `calls`: tool calls that came before."""
        return self.choice(delta)

    def choice(self, delta: Delta) -> dict[str, Any]:
        """A whole choice."""
        tokenizer = self.service.loaded.tokenizer
        scores = None if self.top is None else of_completion(tokenizer, delta.tokens, delta.offsets, self.top)
        return {"text": delta.text, "logprobs": scores}


class ChatAnswer(TextAnswer):
    """The answer of /v1/chat/completions."""

    prefix = "chatcmpl-"
    kind, streamed_kind = "chat.completion", "chat.completion.chunk"

    @classmethod
    async def prepare(cls, service: Service, body: ChatBody, job: Job) -> ChatAnswer:  # type: ignore[override]
        service.check_chat()
        tokenizer = service.loaded.tokenizer
        messages, tools = body.messages, body.shown_tools
        words = in_words(service.loaded, body)
        if words:
            messages = told(tokenizer, messages, tools)
        variables = body.chat_template_kwargs or {}
        if body.reasoning_effort is not None:
            _check_effort(service)
            variables = {"reasoning_effort": body.reasoning_effort, **variables}
        ends = {"goes_on": bool(body.continue_final_message), "prompts": body.add_generation_prompt is not False}
        shown = None if words else tools
        ids = await asyncio.to_thread(rendered, tokenizer, messages, **ends, tools=shown, variables=variables)
        top = (body.top_logprobs or 0) if body.logprobs else None
        form = held_calls(service.loaded, body, ids, words)
        texts, config = await service.texts(job, ids, body, None, top, form)
        parser = partial(response_parser, service.loaded, ids, tools, words and tools is not None)
        choices = [Choice(tokenizer, config, parser, body.stop_token_ids) for _ in texts]
        return cls(service, job, texts, choices, top, body.wants_usage)

    def opened(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, delta: Delta, calls: int) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.calls:
            said["tool_calls"] = [{"index": calls + place, **one} for place, one in enumerate(_calls(delta))]
        return {"delta": said, "logprobs": self._logprobs(delta)}

    def choice(self, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.calls:
            said |= {"content": delta.text or None, "tool_calls": _calls(delta)}
        return {"message": said, "logprobs": self._logprobs(delta)}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if self.top is None else of_chat(self.service.loaded.tokenizer, delta.tokens)


def _calls(delta: Delta) -> list[dict[str, Any]]:
    return [{"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": call._asdict()} for call in delta.calls]


def _ids(service: Service, prompt: str | list[int]) -> torch.Tensor:
    if isinstance(prompt, str):
        return service.loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
    if max(prompt) >= service.target.embedded:
        raise invalid("prompt", f"expected token ids below {service.target.embedded}, got {max(prompt)}")
    return torch.tensor([prompt])


def _check_effort(service: Service) -> None:
    """Raises ApiError where the chat template does not read how much a model is to reason."""
    template = service.loaded.tokenizer.get_chat_template()
    if not re.search(r"\breasoning_effort\b", template):
        raise ApiError(
            400,
            "reasoning_effort: expected a model whose chat template reads it, got one whose template does not; leave it"
            " out, or give what the template has in chat_template_kwargs",
            "unsupported",
            "reasoning_effort",
        )
