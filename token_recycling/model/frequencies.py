"""Rotary frequencies that forward passes change: with dynamic scaling they follow the longest sequence so far.

They lie in the model, so that two sequences that are decoded by turns would share them. Each call keeps its own between
its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from .target import Target

Frequencies = list[tuple[dict[str, Any], dict[str, torch.Tensor | None]]]
"""Of each module that has some: its attributes, and its buffers."""


def turns_of(target: Target) -> Callable[[], AbstractContextManager[None]]:
    """Return what a call enters for the length of each step: nothing unless its forward passes change the model."""
    border = target.info.border
    return OwnFrequencies(target).turn if border is not None and border.changes_model else nullcontext


class OwnFrequencies:
    """The frequencies of one call, which are the model's during its turns."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._modules = [module for module in target.model.modules() if hasattr(module, "max_seq_len_cached")]
        self._own: Frequencies | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """For the length of the block, the model has the frequencies of this call. Other calls wait for the length of a
        step, not for that of a call, which may be suspended for ever; afterwards the model is as it was before.
        """
        with self._target.alone():
            before = _read(self._modules)
            if self._own is not None:
                _write(self._modules, self._own)
            try:
                yield
            finally:
                self._own = _read(self._modules)
                _write(self._modules, before)


def _read(modules: list[torch.nn.Module]) -> Frequencies:
    return [
        (
            {name: value for name, value in vars(module).items() if _changes(name)},
            {name: value for name, value in module.named_buffers(recurse=False) if name.endswith("inv_freq")},
        )
        for module in modules
    ]


def _changes(name: str) -> bool:
    return name.endswith("max_seq_len_cached") or name == "attention_scaling"


def _write(modules: list[torch.nn.Module], frequencies: Frequencies) -> None:
    for module, (attributes, buffers) in zip(modules, frequencies, strict=True):
        vars(module).update(attributes)
        for name, value in buffers.items():
            setattr(module, name, value)
