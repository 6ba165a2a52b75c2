"""Tensors in nested arguments and results. torch's own functions for this take longer than most operations of a tiny
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return the value with `change` applied to all of its tensors."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: mapped(change, one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, one) for one in value])
    return value
