"""CUDA graphs simulated on a CPU: the operations of one run are recorded and replayed with the same tensors.

No Python code runs in a replay. So values that a step takes from Python, such as a length or a slot, are those of the
recording, as in a captured graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from support.nested import tensors_in
from torch.utils._python_dispatch import TorchDispatchMode


class Recorder(TorchDispatchMode):
    """Record every operation of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, list(tensors_in(result))))
        return result

    def replay(self) -> None:
        """Run all operations again; their results overwrite the first ones."""
        for func, args, kwargs, results in self.calls:
            for first, second in zip(results, tensors_in(func(*args, **kwargs)), strict=True):
                if first.data_ptr() != second.data_ptr():
                    first.copy_(second)


class RecordedGraphs:
    """Replacement for `graphs.Graphs`."""

    def __init__(self, device: torch.device) -> None:
        self.kept: dict[Hashable, tuple[Recorder, Any]] = {}
        self.replays = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self.kept

    def forget(self) -> None:
        self.kept.clear()

    def run(self, key: Hashable, function: Callable[[], Any]) -> Any:
        if key not in self.kept:
            recorder = Recorder()
            with recorder:
                result = function()
            self.kept[key] = recorder, result
        recorder, result = self.kept[key]
        recorder.replay()
        self.replays += 1
        return result
