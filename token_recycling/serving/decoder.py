"""How sequences are decoded: a fair queue, worker threads, and the model, batched or one sequence at a time.

Each worker calls transformers' `generate` for a sequence. Where sequences are batched, these calls share the forward
passes of one decoding thread. Otherwise the worker decodes by itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cuda_graphs import FAST, backend_for, capture_common, captured_or_eager
from ..drafters._base import Drafter
from ..hf.acceleration import Acceleration, view
from ..hf.batched import DecodingThread
from ..loop.hints import Hints
from ..model.self_test import ready
from ..model.tree_model import TreeModel
from .batch_slots import BatchSlots


class Decoder:
    """Decodes the sequences of one model."""

    def __init__(self, target: TreeModel, drafter: Drafter, slots: BatchSlots, fast: str) -> None:
        """`fast`: whether forward passes are captured, as the setting of that name. Raises NoFastPathError."""
        self.model, self.slots = target.model, slots
        backend = backend_for(FAST[fast])
        self._backend = captured_or_eager if fast == "on" else backend
        self.batch = DecodingThread(self.model, self._backend) if slots.size > 1 else None
        """Decodes all sequences in one batch; None where one is decoded at a time."""
        capture_common(target, drafter, backend, slots.size)
        self.workers = WorkerPool(slots.size)

    def accelerated(self, drafter: Drafter, seed: int, hints: Hints) -> PreTrainedModel:
        """Return a view of the model whose `generate` decodes one sequence; call it in a worker."""
        if self.batch is not None:
            return self.batch.model(drafter, seed, hints)
        torch.manual_seed(seed)
        return view(self.model, Acceleration(drafter, self._backend, ready(self.model), hints=hints))

    def unbatch(self, reason: str) -> None:
        """Decode one sequence at a time from now on; nothing may be running."""
        self.close()
        self.slots, self.batch, self.workers = BatchSlots(1, reason), None, WorkerPool()

    def between_steps(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function while no drafter learns; return the future of its result."""
        return self.workers.submit(function) if self.batch is None else self.batch.between_steps(function)

    def close(self) -> None:
        """Wait for all queued sequences; may be called again."""
        self.workers.close()
        if self.batch is not None:
            self.batch.close()


class WorkerPool:
    """Runs calls in threads; queued calls are taken round-robin by API key."""

    def __init__(self, threads: int = 1) -> None:
        self.running = 0
        """Number of running calls."""
        self._threads = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="generation")
        self._waiting: dict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = {}
        """By key, in round-robin order: the next key first."""
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of queued calls."""
        with self._lock:
            return sum(map(len, self._waiting.values()))

    def submit(self, fn: Callable[..., Any], *args: Any, key: str = "") -> Future[Any]:
        """Queue a call for a key; return the future of its result."""
        task: Future[Any] = Future()
        with self._lock:
            self._waiting.setdefault(key, deque()).append((task, partial(fn, *args)))
        self._threads.submit(self._run_next)
        return task

    def async_submit(self, fn: Callable[..., Any], *args: Any, key: str = "") -> asyncio.Future[Any]:
        """Queue a call from the event loop; return an awaitable future."""
        return asyncio.wrap_future(self.submit(fn, *args, key=key))

    def close(self) -> None:
        """Wait for all queued calls; no further one may be submitted."""
        self._threads.shutdown()

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
