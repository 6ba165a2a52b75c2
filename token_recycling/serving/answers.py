"""The answers of /v1/completions and /v1/chat/completions, whole or as server-sent events, in OpenAI's form."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any

from .choices import Choice, Delta
from .errors import CancelledError, failure
from .job import Job
from .logprobs import Scored, of_chat, of_completion
from .service import Service
from .texts import Text
from .told import told
from .usage import usage


class Form:
    """How /v1/completions says it. `top`: the likeliest tokens that are wanted, None for no log-probabilities."""

    kind = streamed_kind = "text_completion"

    def __init__(self, tokenizer: Any, top: int | None) -> None:
        self.tokenizer, self.top = tokenizer, top

    def opened(self) -> dict[str, Any] | None:
        """What a choice says in a stream before its text."""
        return None

    def streamed(self, delta: Delta, calls: int) -> dict[str, Any]:
        """A part of a choice; `calls`: tool calls that came before."""
        return self.whole(delta)

    def whole(self, delta: Delta) -> dict[str, Any]:
        """A choice."""
        return {"text": delta.text, "logprobs": self.logprobs(delta)}

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        """The log-probabilities of a choice or a part of it."""
        return None if self.top is None else of_completion(self.tokenizer, delta.tokens, delta.offsets, self.top)


class ChatForm(Form):
    """How /v1/chat/completions says it."""

    kind, streamed_kind = "chat.completion", "chat.completion.chunk"

    def opened(self) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def streamed(self, delta: Delta, calls: int) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.calls:
            said["tool_calls"] = [{"index": calls + place, **one} for place, one in enumerate(self._calls(delta))]
        return {"delta": said, "logprobs": self.logprobs(delta)}

    def whole(self, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.reasoning:
            said["reasoning_content"] = delta.reasoning
        if delta.calls:
            said |= {"content": delta.text or None, "tool_calls": self._calls(delta)}
        return {"message": said, "logprobs": self.logprobs(delta)}

    def logprobs(self, delta: Delta) -> dict[str, Any] | None:
        return None if self.top is None else of_chat(self.tokenizer, delta.tokens)

    def _calls(self, delta: Delta) -> list[dict[str, Any]]:
        return [
            {
                "id": f"call_{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in delta.calls
        ]


@dataclass
class Asked:
    """A request that is ready to be generated."""

    job: Job
    texts: Sequence[Text]
    choices: Sequence[Choice]
    form: Form
    echoes: Sequence[str] = ()
    """The prompts of the choices, where answers begin with them."""
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, service: Service, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer, or an event of a stream."""
        about = {"id": self.job.id, "object": kind, "created": self.created, "model": service.settings.name}
        return {**about, "choices": choices}

    def usage(self) -> dict[str, Any]:
        """The usage block, at the end."""
        return usage(self.job, sum(choice.tokens for choice in self.choices))

    async def deltas(self, service: Service) -> AsyncGenerator[tuple[int, Delta, str | None]]:
        """Index, what came, and at its end why each choice ended."""

        def begin(tell: Callable[[tuple[int, list[Scored]]], None]) -> asyncio.Future[Any]:
            """The tokens of a step, none at the end of a text; those of a prompt that is scored come first."""
            self.job.texts = len(self.texts)

            def generated(index: int, text: Text) -> asyncio.Future[Any]:
                call = partial(self.job.generate_text, text, lambda tokens: tell((index, tokens)))
                return service.worker.async_submit(call, key=self.job.key)

            return asyncio.gather(*starmap(generated, enumerate(self.texts)))

        begun: set[int] = set()
        async with contextlib.aclosing(told(self.job, begin)) as steps:
            async for index, tokens in steps:
                choice = self.choices[index]
                if self.echoes and index not in begun:
                    begun.add(index)
                    scored = tokens if self.texts[index].scored_prompt is not None else []
                    yield index, choice.echo(self.echoes[index], scored), None
                    if scored:
                        continue
                if tokens:
                    yield index, choice.push(tokens), None
                else:
                    yield index, choice.end(), choice.finish_reason


async def whole_answer(service: Service, asked: Asked) -> dict[str, Any]:
    """The answer as one object; raises CancelledError if its client has gone, and what the generation raised."""
    deltas, reasons = [Delta() for _ in asked.choices], [""] * len(asked.choices)
    async for index, delta, reason in asked.deltas(service):
        deltas[index] += delta
        reasons[index] = reason or ""
    if not all(reasons):
        raise CancelledError
    choices = [
        {"index": index, "finish_reason": reason, **asked.form.whole(delta)}
        for index, (delta, reason) in enumerate(zip(deltas, reasons, strict=True))
    ]
    return {**asked.body(service, asked.form.kind, choices), "usage": asked.usage()}


async def streamed_answer(service: Service, asked: Asked) -> AsyncGenerator[str]:
    """The answer as server-sent events; an error ends it with an event of OpenAI's form."""

    def event(choices: list[dict[str, Any]], **more: Any) -> str:
        usage = {"usage": None} if asked.include_usage else {}
        return _event({**asked.body(service, asked.form.streamed_kind, choices), **usage, **more})

    calls = [0] * len(asked.choices)
    try:
        for index in range(len(asked.choices)):
            opened = asked.form.opened()
            if opened is not None:
                yield event([{"index": index, "finish_reason": None, **opened}])
        async with contextlib.aclosing(asked.deltas(service)) as deltas:
            async for index, delta, reason in deltas:
                if delta or reason:
                    said = asked.form.streamed(delta, calls[index])
                    yield event([{"index": index, "finish_reason": reason, **said}])
                calls[index] += len(delta.calls)
        if asked.include_usage:
            yield event([], usage=asked.usage())
        yield "data: [DONE]\n\n"
    except Exception as error:
        yield _event(failure(error))
    finally:
        asked.job.cancel()


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"
