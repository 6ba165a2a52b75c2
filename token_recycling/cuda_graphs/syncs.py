"""Finds what would make the host wait for the device, on any machine.

A captured step must not ask the device for a number, nor make tensors whose size depends on numbers. `torch.cuda` can
report the first on an accelerator; here the operations themselves are looked at, so that a CPU finds them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
_WAITING = {
    aten._local_scalar_dense,
    aten._unique2,
    aten.bincount,
    aten.equal,
    aten.is_nonzero,
    aten.item,
    aten.masked_select,
    aten.multinomial,
    aten.nonzero,
    aten.unique_consecutive,
    aten.unique_dim,
}
"""Operations that read numbers on the host, or whose result is as large as the numbers say."""
_READING = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class HostWaitsError(RuntimeError):
    """An operation would make the host wait for the device."""


@contextmanager
def without_waiting() -> Iterator[None]:
    """Raises `HostWaitsError` at the first thing in the block that would make the host wait."""
    with _Operations(), _Readings():
        yield


class _Readings(TorchFunctionMode):
    """Looks at what Python asks of tensors: on a CPU numbers are read without any operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING:
            raise HostWaitsError(f"expected operations that the host need not wait for, got Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Looks at torch's own operations, whoever asks for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        sized_by_numbers = packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in _WAITING or sized_by_numbers or (packet in _INDEXING and _by_truth(args[1])):
            raise HostWaitsError(f"expected operations that the host need not wait for, got {packet}")
        if func in (aten._to_copy.default, aten.copy_.default) and not kwargs.get("non_blocking"):
            devices = {one.device.type for one in tree_leaves((args, kwargs.get("device"))) if hasattr(one, "device")}
            devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") is not None else set()
            if len(devices) > 1:
                raise HostWaitsError(
                    f"expected copies within a device, got {packet} between {' and '.join(sorted(devices))}"
                )
        return func(*args, **kwargs)


def _by_truth(indices: Any) -> bool:
    """Whether entries are picked by a mask, so that their number depends on it."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
