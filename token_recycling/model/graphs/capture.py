"""Repeated runs of a step: captured as a CUDA graph if there is CUDA, else operation by operation.

A graph replays the operations of one run without Python in between, so a step takes only the device's time. It stores
addresses: all tensors that it reads and writes must stay in place. Cost: some microseconds on the host per replay. A
capture takes three runs, which count as compilation, not as a step.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..._util.compiled import compiling
from ..._util.locks import CAPTURING

logger = logging.getLogger("token_recycling")

_MOST = 96
"""Maximum number of graphs; the most recently used ones are kept."""


class Graphs:
    """Captured runs by key, which share one memory pool and one stream: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()
        self.stopped = False
        """Whether captures have stopped for lack of memory."""
        if device.type == "cuda":
            # Later captures reuse the memory of a pool only on the same stream.
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def __contains__(self, key: Hashable) -> bool:
        """Return whether a run of this key needs no further capture; always true without CUDA."""
        return self.device.type != "cuda" or key in self._kept

    def forget(self) -> None:
        """Drop all graphs, because memory that they point to has moved."""
        self._kept.clear()

    def stop(self, reason: str) -> None:
        """Drop all graphs and capture no more, with a warning."""
        self.forget()
        if not self.stopped:
            self.stopped = True
            logger.warning("forward passes are no longer captured as CUDA graphs: %s", reason)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        """Return the result of `function()`: for one key the same tensors, with new numbers. The function may run
        several times, so its effects must not depend on how often.
        """
        if self.device.type != "cuda" or self.stopped:
            return function()
        if key not in self._kept:
            began = time.perf_counter()
            try:
                self._kept[key] = self._capture(function)
            except torch.OutOfMemoryError:
                self.stop("there was not enough memory for another one")
                return function()
            compiling.seconds += time.perf_counter() - began
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        graph, result = self._kept[key]
        graph.replay()
        return result

    def _capture(self, function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture a run, after two runs in which everything is loaded and compiled."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                function()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # In this mode other threads may perform operations that a capture forbids, such as allocating memory.
        how: dict[str, Any] = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        with CAPTURING, _uncollected(), torch.cuda.graph(graph, **how):
            result = function()
        torch.cuda.synchronize(self.device)
        return graph, result


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within the block, the cyclic garbage collector frees no tensors, which would end a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
