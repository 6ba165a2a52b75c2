"""Rotary frequencies that forward passes change: with dynamic scaling they follow the longest sequence so far.

They are stored in the model, so two sequences decoded alternately would share them. Each call keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from transformers import PreTrainedModel

Values = list[tuple[dict[str, Any], dict[str, torch.Tensor | None]]]
"""For each module that has frequencies: its attributes, and its buffers."""


class Frequencies:
    """The frequencies of one call, which the model has during the call's turns."""

    def __init__(self, model: PreTrainedModel, lock: RLock) -> None:
        self._modules = [module for module in model.modules() if hasattr(module, "max_seq_len_cached")]
        self._lock = lock
        self._own: Values | None = None

    @contextmanager
    def turn(self, ends: bool = False) -> Iterator[None]:
        """Within the block, the model has the frequencies of this call. Other calls wait for one step, not for a whole
        call, which may be suspended forever. Afterwards the model is as before, or, if the call `ends`, as after
        `generate`.
        """
        with self._lock:
            before = _read(self._modules)
            if self._own is not None:
                _write(self._modules, self._own)
            try:
                yield
            finally:
                self._own = _read(self._modules)
                if not ends:
                    _write(self._modules, before)


def _read(modules: list[torch.nn.Module]) -> Values:
    return [
        (
            {name: value for name, value in vars(module).items() if _changes(name)},
            {name: value for name, value in module.named_buffers(recurse=False) if name.endswith("inv_freq")},
        )
        for module in modules
    ]


def _changes(name: str) -> bool:
    return name.endswith("max_seq_len_cached") or name == "attention_scaling"


def _write(modules: list[torch.nn.Module], frequencies: Values) -> None:
    for module, (attributes, buffers) in zip(modules, frequencies, strict=True):
        vars(module).update(attributes)
        for name, value in buffers.items():
            setattr(module, name, value)
