"""Rotary frequencies that forward passes change: with dynamic scaling they follow the longest sequence so far.

They lie in the model, so that two sequences that are decoded by turns would share them. Each call keeps its own between
its steps.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, TypeVar

import torch

from .target import Target

T = TypeVar("T")
Frequencies = list[tuple[dict[str, Any], dict[str, torch.Tensor | None]]]
"""Of each module that has some: its attributes, and its buffers."""


def by_turns(target: Target, steps: Iterator[T]) -> Generator[T]:
    """Yield the steps of a call whose forward passes change the model. Other calls wait for the length of a step, not
    for that of a call, which may be suspended for ever; a suspended call leaves the model as it was before.
    """
    modules = [module for module in target.model.modules() if hasattr(module, "max_seq_len_cached")]
    own: Frequencies | None = None
    while True:
        with target.alone():
            before = _read(modules)
            if own is not None:
                _write(modules, own)
            step = next(steps, None)
            if step is None:
                return
            own = _read(modules)
            _write(modules, before)
        yield step


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
