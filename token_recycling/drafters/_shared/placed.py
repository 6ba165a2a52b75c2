"""Places draft modules on the target's device: a copy, since the original may serve other targets. Cost: its weights
again, once for a target and its place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ..._util.locks import Lock
from ...model.target import Target

T = TypeVar("T")
_Module = TypeVar("_Module", bound=torch.nn.Module)


def placed_copy(module: _Module, device: torch.device, dtype: torch.dtype) -> _Module:
    """Copy a module to a device, with parameters of a type, without gradients; those that are so already are shared."""
    made = copy.deepcopy(module, {id(weight): weight for weight in module.parameters()}).eval()
    for part in made.modules():
        for name, weight in [*part.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(part, name, torch.nn.Parameter(weight.detach().to(device, dtype), requires_grad=False))
        for name, buffer in [*part.named_buffers(recurse=False, remove_duplicate=False)]:
            setattr(part, name, buffer.to(device))  # such as frequencies of positions, which need all their bits
    return made


class Placed(Generic[T]):
    """Keeps what was made for a target, until there is another target or it has another device or type."""

    def __init__(self) -> None:
        self._last: tuple[Target, T] | None = None
        self._making = Lock()

    def __reduce__(self) -> tuple[type[Placed[T]], tuple[()]]:
        """Copies and pickles begin empty: what is kept belongs to a target that is not among what is copied."""
        return type(self), ()

    def of(self, target: Target, check: Callable[[], None], make: Callable[[], T]) -> T:
        """Return what `make()` gave for the target as it is; call `check()` first where the target is another one."""
        with self._making:
            before = None if self._last is None else self._last[0]
            if before is None or before.model is not target.model:
                check()
            elif self._last is not None and (before.device, before.dtype) == (target.device, target.dtype):
                return self._last[1]
            made = make()
            self._last = target, made
            return made
