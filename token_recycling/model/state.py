"""A model's state: which operations a forward pass would run, and on which tensors, seen without running one.

Steps that were captured are replayed without Python. So what Python would decide is looked at before a text: an adapter
that was switched, disabled or scaled, a replaced part, a moved weight, an option of the configuration or of torch. Of
every module its attributes are compared, since peft and others keep in them what their passes do; of tensors where they
lie and their form. What changes inside other objects, or in methods besides `forward`, is not seen. Nothing is kept
alive. Cost: some 1.3 ms for 320 modules with 220 weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from transformers import PretrainedConfig, PreTrainedModel

from .compat import precision_options
from .remembered import place

_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has: weights, parts and hooks, which are looked at by themselves."""
_ELSEWHERE = frozenset({"acceleration", "generation_config"})
"""Attributes that decide nothing of a pass."""
_SKIPPED = (_OF_TORCH | _ELSEWHERE) - {"training"}
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_HARMLESS = frozenset({"transformers.utils.output_capturing", "token_recycling.model.inspection"})
"""Modules whose hooks note down what they see and change nothing."""


class State:
    """Equal to a later one as long as a forward pass runs the same operations on the same tensors."""

    def __init__(self, model: PreTrainedModel, attention: str) -> None:
        """`attention`: the implementation of the model's passes (`ModelInfo.attention`)."""
        self._parts: list[Any] = [attention, *_options()]
        """Plain values; of all else the identity, a number that is its own while it lives."""
        self._lives: list[weakref.ref] = []
        self._seen: set[int] = {id(model)}
        self._open: list[torch.nn.Module] = [model]
        self._hooks(None)
        while self._open:
            self._module(self._open.pop())

    def __eq__(self, later: object) -> bool:
        if not isinstance(later, State) or self._parts != later._parts:
            return False
        return all(alive() is not None for alive in self._lives)

    def _module(self, module: torch.nn.Module) -> None:
        kind, attributes = type(module), module.__dict__
        self._parts.append(kind.__qualname__)  # not the class, which is another one once the model is accelerated
        self._same(kind.forward)
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            self._hooks(module)
        for tensors in (attributes["_parameters"], attributes["_buffers"]):
            for name, tensor in tensors.items():
                self._parts.append(name)
                self._value(tensor)
        for name, part in attributes["_modules"].items():
            self._parts.append(name)
            self._value(part)
        self._attributes(attributes)

    def _attributes(self, attributes: Mapping[str, Any]) -> None:
        for name, value in list(attributes.items()):  # another thread's pass may add some
            if name not in _SKIPPED:
                self._parts.append(name)
                self._value(value)

    def _value(self, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN:
            self._parts += (kind, value)
        elif isinstance(value, torch.Tensor):
            self._same(value)
            self._parts += (place(value), value.dtype, value.device, value.shape, value.stride())
        elif isinstance(value, torch.nn.Module):
            self._same(value)
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._open.append(value)
        elif isinstance(value, (Mapping, list, tuple, set, frozenset)):
            self._container(value)
        else:
            self._same(value)
            if isinstance(value, PretrainedConfig) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._attributes(vars(value))

    def _container(self, values: Any) -> None:
        self._parts += (type(values), len(values))
        if id(values) in self._seen:
            return  # it holds itself
        self._seen.add(id(values))
        for value in sorted(values, key=repr) if isinstance(values, (set, frozenset)) else values:
            self._value(value)
        if isinstance(values, Mapping):
            for value in values.values():
                self._value(value)
        self._seen.discard(id(values))

    def _hooks(self, module: torch.nn.Module | None) -> None:
        for hook in hooks_of(module):
            self._same(hook)

    def _same(self, thing: Any) -> None:
        self._parts.append(id(thing))
        try:
            self._lives.append(weakref.ref(thing))
        except TypeError:  # a small object that is known by its number alone
            self._parts.append(type(thing))


def hooks_of(module: torch.nn.Module | None) -> Iterator[Callable[..., Any]]:
    """Hooks around a module's forward pass that may change it; for None those around every module that there is."""
    kinds = torch_modules._global_forward_hooks, torch_modules._global_forward_pre_hooks
    if module is not None:
        kinds = module._forward_hooks, module._forward_pre_hooks
    for hooks in kinds:
        for hook in list(hooks.values()):
            if getattr(hook, "__module__", None) not in _HARMLESS:
                yield hook


def _options() -> list[Any]:
    """Options of torch that choose between operations, or their precision."""
    cuda, matmul = torch.backends.cuda, torch.backends.cuda.matmul
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_deterministic_debug_mode(),
        *precision_options(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cuda.preferred_blas_library(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
        # There is no public way to read what `sdpa_kernel(..., set_priority=True)` sets.
        *getattr(torch._C, "_get_sdp_priority_order", tuple)(),
    ]
