"""The worker threads that generate, and the fair queue of their calls."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any


class Worker:
    """Runs calls in a pool of threads; queued calls are taken round-robin by API key."""

    def __init__(self, threads: int = 1) -> None:
        self.running = 0
        """Number of running calls."""
        self._pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="generation")
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """By key, in round-robin order: the next key first."""
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def submit(self, fn: Callable[..., Any], *args: Any, key: str = "", **kwargs: Any) -> Future[Any]:
        """Queue a call for a key; return the future of its result."""
        task: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(key, deque()).append((task, partial(fn, *args, **kwargs)))
        self._pool.submit(self._run_next)
        return task

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Queue a call from the event loop; return an awaitable future."""
        return asyncio.wrap_future(self.submit(fn, *args, **kwargs))

    def close(self) -> None:
        """Wait for all queued calls; no further one may be submitted."""
        self._pool.shutdown()

    def _run_next(self) -> None:
        """Run one call of the next key, then requeue that key last."""
        with self._lock:
            key = next(iter(self._waiting))
            tasks = self._waiting.pop(key)
            task, call = tasks.popleft()
            if tasks:
                self._waiting[key] = tasks
            self.running += 1
        try:
            if task.set_running_or_notify_cancel():
                task.set_result(call())
        except BaseException as error:
            task.set_exception(error)
        finally:
            with self._lock:
                self.running -= 1
