"""Puts what drafts where the target is: a copy, since the original may serve other targets. Cost: its weights again."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch

_Module = TypeVar("_Module", bound=torch.nn.Module)


def placed_copy(module: _Module, device: torch.device, dtype: torch.dtype) -> _Module:
    """A copy of a module on a device and with parameters of a type, without gradients."""
    made = copy.deepcopy(module).eval()
    for part in made.modules():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(weight.detach().to(device, dtype), requires_grad=False)
        for name, buffer in part._buffers.items():  # such as frequencies of positions, which need all their bits
            part._buffers[name] = None if buffer is None else buffer.to(device)
    return made
