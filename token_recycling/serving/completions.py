"""`POST /v1/completions`: from a request to its choices, whole or streamed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import torch

from .answers import Answer, Event
from .errors import invalid
from .job import Job, TokenSequence
from .logprobs import completion_logprobs
from .output import Delta, Output, whole
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

    @classmethod
    async def prepare(cls, service: Service, body: CompletionRequest, job: Job) -> CompletionAnswer:
        tokenizer, sequences, choices = service.loaded.tokenizer, list[TokenSequence](), list[Output]()
        for prompt in body.prompts:
            ids = await asyncio.to_thread(_ids, service, prompt, body.add_special_tokens is not False)
            made, config = await sequences_of(service, job, ids, body, _DEFAULT_TOKENS, body.logprobs)
            for sequence in made:
                sequences.append(sequence)
                include_stop = bool(body.include_stop_str_in_output)
                choices.append(Output(tokenizer, config, hidden=body.stop_token_ids, include_stop=include_stop))
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
            async for index, delta in deltas:
                if delta:
                    yield self._event([{"index": index, "finish_reason": delta.finish_reason, **self.part(delta)}])
        if self.include_usage:
            yield self._event([], usage=self.usage())
        yield "", None

    async def complete(self) -> dict[str, Any]:
        parts: list[list[Delta]] = [[] for _ in self.choices]
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                parts[index].append(delta)
        choices = [
            {"index": index, "finish_reason": output.finish_reason, **self.choice(output)}
            for index, output in enumerate(map(whole, parts))
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
        return {"text": delta.of("text"), "logprobs": scores}


def _ids(service: Service, prompt: str | list[int], special: bool) -> torch.Tensor:
    if isinstance(prompt, str):
        ids = service.loaded.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)["input_ids"]
        return ids.long()  # of an empty prompt they are floats
    if max(prompt) >= service.target.embedded:
        raise invalid("prompt", f"token ids must be < {service.target.embedded}, got {max(prompt)}")
    return torch.tensor([prompt])
