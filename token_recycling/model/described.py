"""Values of a configuration, and those that foreign code and passes read, in a form that is compared later."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of values that are described by themselves."""


def address_of(weight: torch.Tensor) -> int:
    """Address of a tensor's numbers."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0


def describe(value: Any, values: list[Any], objects: list[Any], seen: set[int] | None = None) -> None:
    """Add to `values` something that is equal for equal plain values, and containers of them, of the same types; and to
    `objects` what counts by identity. `seen`: configurations that were described before, and containers around it.
    """
    cls, seen = type(value), set() if seen is None else seen
    if cls in PLAIN:
        values += (cls, value)
    elif issubclass(cls, torch.Tensor):
        objects.append(value)
        strides = value.stride() if value.layout is torch.strided else ()
        values += (address_of(value), value.dtype, value.device, value.shape, strides)
    elif issubclass(cls, PretrainedConfig):
        objects.append(value)
        if id(value) not in seen:
            seen.add(id(value))
            describe(vars(value), values, objects, seen)
    elif issubclass(cls, _CONTAINERS) and not issubclass(cls, torch.nn.Module):
        values += (cls, len(value))
        if id(value) not in seen:  # else it holds itself
            seen.add(id(value))
            for item in _items_of(value):
                describe(item, values, objects, seen)
            seen.discard(id(value))
    else:
        values.append(cls)
        objects.append(value)


def _items_of(container: Any) -> list[Any]:
    """Return what a container holds, in the same order for equal ones of a type."""
    if isinstance(container, (set, frozenset)):
        return sorted(container, key=repr)
    return [*container, *container.values()] if isinstance(container, Mapping) else [*container]
