"""What the threads that generate tell of a request, for the event loop, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, TypeVar

from .errors import CancelledError
from .job import Job

T = TypeVar("T")


async def told(job: Job, begin: Callable[[Callable[[T], None]], asyncio.Future[Any]]) -> AsyncGenerator[T]:
    """What is told from when `begin` has begun to generate, with the function that tells, to the end. Closing the
    iterator ends the generation; raises what it raised, nothing if its client has gone.
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
        try:
            await generation
        except CancelledError:
            return
    finally:
        job.cancel()
