"""Drafters with their own model or head, prepared once per target. Cost: its weights, copied if the target is on
another device or has another dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

import torch

from ..._util.per_object import PerObject
from ...model.target import Target
from .._base import Drafter

T = TypeVar("T")
Module = TypeVar("Module", bound=torch.nn.Module)


class PerTarget(PerObject[T]):
    """One object per target, created again if the target was moved or its dtype, vocabulary or number of layers
    changed.
    """

    def of(self, target: Target, make: Callable[[], T]) -> T:
        """Return the object of a target; create it by `make()` the first time."""
        place = target.device, target.dtype, target.vocab_size, target.config.num_hidden_layers
        return self.get(target.model, place, make)


@dataclass(kw_only=True)
class NeuralDrafter(Drafter, Generic[T]):
    """A drafter with its own model or head, adapted to a target. It learns nothing."""

    _per_target: PerTarget[T] = field(default_factory=PerTarget, init=False, repr=False, compare=False)

    def placed(self, target: Target) -> T:
        """Return the model or head for a target, on its device and in its dtype; checked and created once."""
        return self._per_target.of(target, lambda: self.place(target))

    def place(self, target: Target) -> T:
        """Create the model or head for a target; raises ValueError if it does not fit."""
        raise NotImplementedError(f"{type(self).__name__} must define place()")

    def fit(self, target: Target) -> None:
        self.placed(target)

    def fork(self) -> Self:
        """Return this drafter: nothing is learned, and the model or head is shared."""
        return self


def placed_copy(module: Module, device: torch.device, dtype: torch.dtype) -> Module:
    """Copy a module to a device with parameters of a dtype, without gradients; parameters already there are shared."""
    placed = copy.deepcopy(module, {id(weight): weight for weight in module.parameters()}).eval()
    for part in placed.modules():
        for name, weight in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(part, name, torch.nn.Parameter(weight.detach().to(device, dtype), requires_grad=False))
        for name, buffer in [*part.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(part, name, buffer.to(device))  # such as rotary frequencies, which need full precision
    return placed
