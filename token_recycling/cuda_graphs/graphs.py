"""Runs a step again and again: captured as a CUDA graph where there is CUDA, else operation by operation.

A graph replays the operations of one run with nothing of Python between them: what a step then costs is the device's
time. It holds addresses, so that all tensors it reads and writes stay where they are. Cost of a replay: some
microseconds on the host. Of a capture: three runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from .._util.locks import CAPTURING

_MOST = 96
"""Graphs that are kept, the most recent ones."""


class Graphs:
    """Captured runs by key, sharing one pool of memory: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._kept: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def __contains__(self, key: Hashable) -> bool:
        """Whether a run of this key will not be captured any more; nothing is where there is no CUDA."""
        return self.device.type != "cuda" or key in self._kept

    def forget(self) -> None:
        """Drops all graphs: something they point to has moved."""
        self._kept.clear()

    def run(self, key: Hashable, function: Callable[[], Any], state: Sequence[torch.Tensor]) -> Any:
        """What `function()` returns; the same tensors for one key, filled anew. `state`: what it changes in place."""
        if self.device.type != "cuda":
            return function()
        if key not in self._kept:
            self._kept[key] = self._capture(function, state)
            if len(self._kept) > _MOST:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        graph, result = self._kept[key]
        graph.replay()
        return result

    def _capture(self, function: Callable[[], Any], state: Sequence[torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Run twice beforehand, so that everything is loaded and compiled, and put back what that has changed."""
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                function()
                for tensor, value in zip(state, before, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # In this mode other threads may do what a capture does not allow, as to ask for memory.
        with CAPTURING, torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            result = function()
        return graph, result
