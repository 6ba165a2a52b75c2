"""Answers as their sequences grow: one path for streams and whole answers of all endpoints.

An endpoint is a kind of `Answer`: `prepare` makes it from the body of a request, `events` says what comes while its
texts are generated, and `whole` says all of it at their end. A stream is the events; for a whole answer they are read
to the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from .errors import CancelledError, failure
from .job import Job, OnTokens, TokenSequence
from .logprobs import ScoredToken
from .output import Delta, Output
from .service import Service

T = TypeVar("T")
Event = tuple[str, Any]
"""Name, empty where the API has none, and data, None for the end of OpenAI's streams."""


@dataclass
class Answer:
    """A request that is ready to be generated, and what is said of it."""

    service: Service
    job: Job
    sequences: Sequence[TokenSequence]
    choices: Sequence[Output]
    created: int = field(default_factory=lambda: int(time.time()), init=False)

    prefix: ClassVar[str]
    """What ids of its requests begin with."""

    @classmethod
    async def prepare(cls, service: Service, body: Any, job: Job) -> Answer:
        """The answer to a request; raises ApiError, and what a template raises."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[Event]:
        """Generate, and say what comes; raises CancelledError if the client has gone, and what the generation raises.
        Closing the iterator ends the generation.
        """
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """All of the answer, after the last event."""
        raise NotImplementedError

    def failed(self, error: dict[str, Any]) -> Iterable[Event]:
        """The events that end a stream that failed; `error` is the body of OpenAI's errors."""
        return [("", error)]

    async def streamed(self) -> AsyncGenerator[str]:
        """The events as text; an error ends them with events that say so."""
        try:
            async with contextlib.aclosing(self.events()) as events:
                async for event in events:
                    yield _written(*event)
        except CancelledError:
            return
        except Exception as error:
            for event in self.failed(failure(error)):
                yield _written(*event)
        finally:
            self.job.cancel()

    async def complete(self) -> dict[str, Any]:
        """All of the answer, once it is generated; raises as `events` does."""
        async with contextlib.aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.whole()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Generate all sequences; yield the index of a choice with what a step adds to it."""
        async with contextlib.aclosing(from_threads(self.job, self._begin)) as steps:
            async for index, tokens in steps:
                choice = self.choices[index]
                yield index, choice.push(tokens) if tokens else choice.end()

    def usage(self) -> dict[str, Any]:
        """The usage block, at the end."""
        return self.job.usage(sum(choice.tokens for choice in self.choices))

    def generate(self, sequence: TokenSequence, on_tokens: OnTokens) -> asyncio.Future[Any]:
        """Queue a sequence."""
        return self.service.decoder.workers.async_submit(self.job.generate, sequence, on_tokens, key=self.job.key)

    def _begin(self, put: Callable[[tuple[int, list[ScoredToken]]], None]) -> asyncio.Future[Any]:
        """Queue all sequences; put the index of each with the tokens of a step, with none at its end."""
        self.job.sequences = len(self.sequences)

        def begun(index: int) -> asyncio.Future[Any]:
            return self.generate(self.sequences[index], lambda tokens: put((index, tokens)))

        return asyncio.gather(*map(begun, range(len(self.sequences))))


def _written(name: str, data: Any) -> str:
    """A server-sent event."""
    text = "[DONE]" if data is None else json.dumps(data, ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"


async def from_threads(job: Job, begin: Callable[[Callable[[T], None]], asyncio.Future[Any]]) -> AsyncGenerator[T]:
    """Items from the threads that generate, as they come: `begin` starts them, with the function that passes items on.

    Raises what the generation raises, CancelledError if its client has gone. Closing the iterator ends the generation.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[T | None]()

    def tell(item: T) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    def on_end(generation: asyncio.Future[Any]) -> None:
        if not generation.cancelled():
            generation.exception()  # marks it as retrieved: nothing awaits it once the client has disconnected
        queue.put_nowait(None)

    try:
        generation = begin(tell)
        generation.add_done_callback(on_end)
        while (item := await queue.get()) is not None:
            yield item
        await generation
    finally:
        job.cancel()
