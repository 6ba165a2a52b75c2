"""`POST /v1/completions`: from a request to its choices, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import torch

from .answers import Answer, Event
from .calls import Delta
from .choices import Choice
from .errors import invalid
from .job import Job, TokenSequence
from .logprobs import completion_logprobs
from .protocol import CompletionRequest
from .sequences import sequences_of
from .service import Service

_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""


@dataclass
class CompletionAnswer(Answer):
    """The answer of /v1/completions."""

    top: int | None = None
    """Number of most likely tokens that are wanted for each token; None: no log-probabilities."""
    include_usage: bool = False

    prefix = "cmpl-"
    kind = streamed_kind = "text_completion"

    def __post_init__(self) -> None:
        self._said = [Delta() for _ in self.choices]
        self._reasons: list[str | None] = [None] * len(self.choices)

    @classmethod
    async def prepare(cls, service: Service, body: CompletionRequest, job: Job) -> CompletionAnswer:
        tokenizer, sequences, choices = service.loaded.tokenizer, list[TokenSequence](), list[Choice]()
        for prompt in body.prompts:
            ids = await asyncio.to_thread(_ids, service, prompt)
            made, config = await sequences_of(service, job, ids, body, _DEFAULT_TOKENS, body.logprobs)
            for sequence in made:
                sequences.append(sequence)
                choices.append(Choice(tokenizer, config, hidden=body.stop_token_ids))
                if body.echo:
                    shown = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=True)
                    sequence.scored_prompt = body.logprobs
                    choices[-1].begin_with(shown, scored=body.logprobs is not None)
        return cls(service, job, sequences, choices, body.logprobs, body.wants_usage)

    async def events(self) -> AsyncGenerator[Event]:
        for index in range(len(self.choices)):
            if (opened := self.opened()) is not None:
                yield self._event([{"index": index, "finish_reason": None, **opened}])
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for index, delta, reason in deltas:
                if delta or reason:
                    yield self._event([{"index": index, "finish_reason": reason, **self.part(delta)}])
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
        """Return what a stream has of a choice before its text."""
        return None

    def part(self, delta: Delta) -> dict[str, Any]:
        """Return a part of a choice in a stream."""
        return self.choice(delta)

    def choice(self, delta: Delta) -> dict[str, Any]:
        """Return a whole choice."""
        tokenizer = self.service.loaded.tokenizer
        scores = None if self.top is None else completion_logprobs(tokenizer, delta.tokens, delta.offsets, self.top)
        return {"text": delta.text, "logprobs": scores}


def _ids(service: Service, prompt: str | list[int]) -> torch.Tensor:
    if isinstance(prompt, str):
        return service.loaded.tokenizer(prompt, return_tensors="pt")["input_ids"]
    if max(prompt) >= service.target.embedded:
        raise invalid("prompt", f"token ids must be < {service.target.embedded}, got {max(prompt)}")
    return torch.tensor([prompt])
