"""A simulated second device: it computes on the CPU, but rejects operations across devices, as a real one does.

A tensor of the device wraps the CPU tensor with its values. An operation on tensors of several devices is an error,
except those that torch itself allows: copies, scalars, and indices on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from support.nested import mapped, tensors_in
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

THERE = torch.device("cuda:0")
aten = torch.ops.aten
_INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}


class Elsewhere(torch.Tensor):
    """A tensor on the simulated device. In C++ torch treats it as a CPU tensor; in Python `device` says otherwise."""

    __module__ = "torch"  # counts as torch's own tensor, not as user code

    held: torch.Tensor
    device = property(lambda self: THERE)
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype
        )
        made.held = held
        return made

    def __repr__(self) -> str:
        return f"Elsewhere({self.held})"

    def tolist(self) -> Any:
        return self.held.tolist()

    def cpu(self) -> torch.Tensor:
        return self.held.clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.to and isinstance(args[0], Elsewhere):
            return moved(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def moved(tensor: Elsewhere, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Apply `Tensor.to` to a tensor on the simulated device."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **{k: v for k, v in kwargs.items() if k != "copy"})
    if args and isinstance(args[0], torch.Tensor):
        device = args[0].device
    held = tensor.held.to(dtype or tensor.dtype)
    if device is not None and device.type == "cpu":
        return held.clone() if held is tensor.held else held
    return Elsewhere(held.clone()) if kwargs.get("copy") else tensor if held is tensor.held else Elsewhere(held)


class _Construct(TorchFunctionMode):
    """Handle functions that construct a tensor without dispatching to the mode below."""

    __module__ = "torch.of_the_tests"  # counts as torch's own code

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None and torch.device(kwargs["device"]) == THERE:
            return Elsewhere(func(*args, **{**kwargs, "device": "cpu"}))
        if func is torch._C._nn.pad_sequence and isinstance(args[0][0], Elsewhere):
            return Elsewhere(func([one.held for one in args[0]], *args[1:], **kwargs))
        return func(*args, **kwargs)


class _Dispatch(TorchDispatchMode):
    __module__ = "torch.of_the_tests"  # counts as torch's own code

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


@contextmanager
def another_device() -> Iterator[None]:
    """Allow tensors on the simulated device within a block, without gradients."""
    with (
        mock.patch.object(torch.cuda, "_lazy_init"),
        mock.patch.object(torch.cuda, "get_device_name", return_value="a stand-in"),
        mock.patch.object(torch.accelerator, "synchronize"),
        mock.patch.object(torch.cuda, "get_rng_state", side_effect=lambda device: torch.get_rng_state()),
        mock.patch.object(torch.cuda, "set_rng_state", side_effect=lambda state, device: torch.set_rng_state(state)),
        torch.no_grad(),
        _Construct(),
        _Dispatch(),
    ):
        yield


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the underlying CPU tensors and place the result on the right device."""
    tensors = list(tensors_in((args, kwargs)))
    there = [one for one in tensors if isinstance(one, Elsewhere)]
    here = [one for one in tensors if not isinstance(one, Elsewhere) and one.ndim]
    if func in _INDEXING:
        here = [one for one in here if one is args[0]]
    if there and here and func not in (aten.copy_.default, aten._to_copy.default):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got cpu and {THERE}")
    wanted = kwargs.get("device")
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    made = func(*mapped(_held, args), **mapped(_held, kwargs))
    if func is aten.copy_.default:
        return args[0]
    stays = torch.device(wanted) == THERE if wanted is not None else bool(there)
    known = {id(one.held): one for one in there}
    return mapped(lambda one: _placed(one, stays, known), made)


def _held(one: torch.Tensor) -> torch.Tensor:
    return one.held if isinstance(one, Elsewhere) else one


def _placed(one: torch.Tensor, there: bool, known: dict[int, Elsewhere]) -> torch.Tensor:
    if not there:
        return one
    return known.get(id(one)) if id(one) in known else Elsewhere(one)


def put_there(module: torch.nn.Module) -> None:
    """Move the weights and buffers of a module to the simulated device."""
    for one in module.modules():
        for name, weight in one._parameters.items():
            if weight is not None:
                one._parameters[name] = torch.nn.Parameter(Elsewhere(weight.data), requires_grad=False)
        for name, buffer in one._buffers.items():
            if buffer is not None:
                one._buffers[name] = Elsewhere(buffer)
