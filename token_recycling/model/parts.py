"""The parts of a model as they stand: modules, hooks, attributes, compiled calls; and comparing them with later ones.

Nothing here runs a model or judges it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers import PretrainedConfig

from .compat import CHILDREN, forward_hooks

ATTRIBUTES_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""Attributes that every module has."""
CALLED_INSTEAD = frozenset(name for name, value in vars(torch.nn.Module).items() if value is None)
"""Attributes that torch sets on a module when it compiles it, and calls in place of its code."""
_OBSERVING = frozenset({"transformers.utils.output_capturing", "token_recycling.model.hidden"})
"""Modules whose hooks note down what they see and change nothing."""
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of values that are described by themselves."""


# Modules


def parts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the model and all modules in it, each once, the model first."""
    parts, seen = [model], {model}
    for part in parts:  # which grows
        children = part.__dict__.get(CHILDREN)
        for child in dict(part.named_children()).values() if children is None else children.values():
            if child is not None and child not in seen:
                seen.add(child)
                parts.append(child)
    return parts


def own_class(model: torch.nn.Module) -> type:
    """Return the class of a model as it was before it was accelerated."""
    cls: type = getattr(type(model), "plain_class", type(model))
    return cls


def own_attributes(holder: Any) -> dict[str, Any]:
    """Attributes of an object but for those that every module has."""
    attributes = getattr(holder, "__dict__", {})
    return {name: value for name, value in list(attributes.items()) if name not in ATTRIBUTES_OF_TORCH}


# Hooks and compiled calls


def hooks_of(module: torch.nn.Module | None) -> Iterator[Callable[..., Any]]:
    """Hooks around a module's forward pass that may change it; for None those around every module that there is."""
    hooks = global_hooks() if module is None else forward_hooks(module)
    yield from (hook for hook in hooks if getattr(hook, "__module__", None) not in _OBSERVING)


def global_hooks() -> list[Callable[..., Any]]:
    """Return all hooks around every module that there is."""
    return [hook for hooks in _GLOBAL_HOOKS for hook in list(hooks.values())]


def _dictionaries_of_global_hooks() -> list[dict[int, Callable[..., Any]]]:
    """Return the dictionaries in which torch keeps hooks around all modules, which are always the same ones."""
    handles = [
        register(lambda *_: None) for register in (register_module_forward_hook, register_module_forward_pre_hook)
    ]
    dictionaries: list[Any] = [handle.hooks_dict_ref() for handle in handles]
    for handle in handles:
        handle.remove()
    return dictionaries


_GLOBAL_HOOKS = _dictionaries_of_global_hooks()


def device_map_hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Hooks of a device map on a module, of the package accelerate, each by itself."""
    for hook in list(vars(module).values()):
        if hasattr(hook, "pre_forward") and not isinstance(hook, torch.nn.Module):
            yield from getattr(hook, "hooks", (hook,))


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module go to a graph that torch.compile made."""
    return is_graph(module.forward) or bool(compiled_calls(module))


def compiled_calls(module: torch.nn.Module) -> list[str]:
    """Names of a module's attributes that torch calls in place of the module's own code, and torch.compile has made."""
    names = CALLED_INSTEAD | {"forward"}
    return [name for name, value in vars(module).items() if name in names and is_graph(value)]


def is_graph(function: Any) -> bool:
    """Whether a function, method or module was made by torch.compile."""
    inner = getattr(function, "__func__", function)
    home = inner.__globals__.get("__name__") if type(inner) is FunctionType else type(inner).__module__
    return hasattr(inner, "get_compiler_config") and str(home).startswith("torch.")


# Comparing


def address_of(weight: torch.Tensor) -> int:
    """Address of a tensor's numbers."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0


class Identities:
    """Objects that count by identity: equal to later ones while they are the same and none of them is gone."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects: Sequence[Any] = [*objects]
        self._numbers = [*map(id, self._objects)]
        self._watches: list[weakref.ref] = []
        self._memory: list[StorageWeakRef] = []
        self._one_is_gone = False

    def __eq__(self, later: object) -> bool:
        if not isinstance(later, Identities) or self._numbers != later._numbers:
            return False
        return not self._one_is_gone and not any(memory.expired() for memory in self._memory)

    __hash__ = None  # type: ignore[assignment]

    def watch(self) -> Identities:
        """Let go of the objects, and notice when one of them is gone: another one may be given its number. Of tensors
        the memory is watched, since torch swaps no tensor that has a weak reference (`torch.utils.swap_tensors`).
        """
        for item in {id(item): item for item in self._objects}.values():
            if isinstance(item, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # sparse ones have several
                    self._memory.append(StorageWeakRef(item.untyped_storage()))
            elif getattr(type(item), "__weakrefoffset__", 0):
                self._watches.append(weakref.ref(item, self._note))
        self._objects = ()
        return self

    def _note(self, gone: object) -> None:
        self._one_is_gone = True


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
        if id(value) in seen:
            return  # it holds itself
        seen.add(id(value))
        for item in sorted(value, key=repr) if issubclass(cls, (set, frozenset)) else list(value):
            describe(item, values, objects, seen)
        if issubclass(cls, Mapping):
            for item in list(value.values()):
                describe(item, values, objects, seen)
        seen.discard(id(value))
    else:
        values.append(cls)
        objects.append(value)
