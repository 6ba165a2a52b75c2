"""A model as it was, compared with the model as it is.

Facts about a model hold as long as its `Fingerprint` does: `form` while parts, weights and configuration are the same
ones, `numbers` while nothing was written to the weights, `code` while the same foreign code runs in it (`foreign`).
Every call compares them once: 0.4 ms for 423 modules. Writing through a tensor's `.data` is not counted by torch.

A captured pass is replayed without Python and depends on more, `operations_of`: all attributes of all modules, options
of the configuration and of torch; of tensors address and shape. Changes inside other objects, or in methods besides
`forward`, are not seen. This costs some milliseconds.

Nothing is kept alive: objects count by their numbers, and one that is gone is no longer the same.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PretrainedConfig, PreTrainedModel

from .compat import CHILDREN, PARAMETERS, methods_of_the_loop, times_written, with_hooks
from .foreign import (
    ATTRIBUTES_OF_TORCH,
    CALLED_INSTEAD,
    OF_FAMILIES,
    attention_functions,
    foreign_hooks,
    global_hooks,
    hooks_of,
    is_graph,
    own_class,
)
from .homes import is_foreign, is_own
from .replaced import foreign_modes, replaced_in_libraries

_METHODS_AROUND = ("__call__", "generate", *methods_of_the_loop())
"""Methods that stand between `generate` and the forward pass."""
_WRAPPERS = frozenset({"builtins", "functools"})
"""Where the types of functions, methods and partials are."""
_SKIPPED = (ATTRIBUTES_OF_TORCH | {"acceleration", "generation_config"}) - {"training"}
"""Attributes that are compared otherwise, or decide nothing of a pass."""
_CONTAINERS = (dict, list, tuple, set, frozenset, Mapping)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})


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


def place(weight: torch.Tensor) -> int:
    """Address of a tensor's numbers."""
    try:
        return weight.data_ptr()
    except RuntimeError:  # a tensor that wraps others has no memory of its own
        return 0


class Identities:
    """Objects that count by identity: equal to later ones while they are the same and none of them is gone."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._things: Sequence[Any] = [*things]
        self._numbers = [*map(id, self._things)]
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
        for thing in {id(thing): thing for thing in self._things}.values():
            if isinstance(thing, torch.Tensor):
                with contextlib.suppress(RuntimeError):  # sparse ones have several
                    self._memory.append(StorageWeakRef(thing.untyped_storage()))
            elif getattr(type(thing), "__weakrefoffset__", 0):
                self._watches.append(weakref.ref(thing, self._note))
        self._things = ()
        return self

    def _note(self, gone: object) -> None:
        self._one_is_gone = True


class Fingerprint:
    """What facts about a model depend on, at one time."""

    def __init__(self, model: PreTrainedModel) -> None:
        parts = parts_of(model)
        attributes = [part.__dict__ for part in parts]
        weights: list[torch.Tensor] = [
            weight for own in attributes for weight in own.get(PARAMETERS, {}).values() if weight is not None
        ]
        try:  # the usual case in one go, since every call looks
            places = [weight.data_ptr() for weight in weights]
        except RuntimeError:  # wrapped tensors have no memory of their own
            places = [place(weight) for weight in weights]
        written = times_written(weights)
        away: list[Any] = []
        if 0 in places:
            # Weights that are offloaded between passes are other tensors after each: of them the form counts.
            away = [(weight.shape, weight.dtype) for weight in weights if weight.is_meta]
            written = [count for count, weight in zip(written, weights, strict=True) if not weight.is_meta]
            weights = [weight for weight in weights if not weight.is_meta]
        kinds: list[Any] = [*map(type, parts)]
        kinds[0] = own_class(model)
        forwards = [own["forward"] for own in attributes if "forward" in own]
        forwards = [
            forward
            for forward in forwards
            if not is_own(type(forward).__module__) or type(forward).__module__ in _WRAPPERS
        ]
        self._ids = Identities(weights), Identities(parts[1:])
        self.form: list[Any] = [
            *self._ids,
            kinds,
            places,
            away,
            "forward" in attributes[0],
            [name in own for name in CALLED_INSTEAD for own in attributes],
            [*map(is_graph, forwards)].count(True),
            getattr(model, "is_quantized", False),
            _values_of(getattr(model, "config", None)),
        ]
        self.numbers = written
        things = _code_in(model, parts, kinds)
        things += filter(is_foreign, forwards)
        self._code_ids = Identities(things)
        self.code: list[Any] = [self._code_ids, [part.training for part in parts], [*map(len, attributes)]]

    def watch(self) -> Fingerprint:
        """Keep this one to be compared with later ones."""
        for ids in (*self._ids, self._code_ids):
            ids.watch()
        self.form[-1] = copy.deepcopy(self.form[-1])  # lists in it may be changed
        return self


def _code_in(model: PreTrainedModel, parts: Sequence[torch.nn.Module], kinds: Sequence[Any]) -> list[Any]:
    """Return code that runs in a model and may be replaced, by identity; `kinds`: the classes of its parts."""
    things: list[Any] = [getattr(kinds[0], name, None) for name in _METHODS_AROUND]
    things += filter(is_foreign, global_hooks())
    things += [one.function for one in replaced_in_libraries()]
    things += foreign_modes()
    things += attention_functions(model)
    distinct = set(kinds)
    forwards = [getattr(kind, "forward", None) for kind in distinct]  # code that was compiled ahead has none
    things += [forward for forward in forwards if isinstance(forward, FunctionType)]
    of_families = [kind for kind in distinct if kind.__module__.startswith(OF_FAMILIES)]
    for names in (
        *map(vars, of_families),
        *(vars(sys.modules[name]) for name in {one.__module__ for one in of_families}),
    ):
        things += [function for function in names.values() if type(function) is FunctionType]
    for part in with_hooks(parts):
        things += foreign_hooks(part)
    return things


def _values_of(config: Any) -> dict[str, Any]:
    """Return all values of a configuration and of nested ones, whose `==` fails where layers differ in size."""
    return {
        name: _values_of(value) if isinstance(value, PretrainedConfig) else value
        for name, value in (vars(config) if config is not None else {}).items()
    }


def describe(value: Any, values: list[Any], things: list[Any], seen: set[int] | None = None) -> None:
    """Add to `values` something that is equal for equal plain values, and containers of them, of the same types; and to
    `things` what counts by identity. `seen`: configurations that were described before, and containers around this one.
    """
    kind, seen = type(value), set() if seen is None else seen
    if kind in _PLAIN:
        values += (kind, value)
    elif issubclass(kind, torch.Tensor):
        things.append(value)
        strides = value.stride() if value.layout is torch.strided else ()
        values += (place(value), value.dtype, value.device, value.shape, strides)
    elif issubclass(kind, PretrainedConfig):
        things.append(value)
        if id(value) not in seen:
            seen.add(id(value))
            describe(vars(value), values, things, seen)
    elif issubclass(kind, _CONTAINERS) and not issubclass(kind, torch.nn.Module):
        values += (kind, len(value))
        if id(value) in seen:
            return  # it holds itself
        seen.add(id(value))
        for item in sorted(value, key=repr) if issubclass(kind, (set, frozenset)) else list(value):
            describe(item, values, things, seen)
        if issubclass(kind, Mapping):
            for item in list(value.values()):
                describe(item, values, things, seen)
        seen.discard(id(value))
    else:
        values.append(kind)
        things.append(value)


def operations_of(model: PreTrainedModel, attention: str, keep: bool = False) -> list[Any]:
    """Return something that a later one is equal to while a forward pass runs the same operations on the same tensors.
    `attention`: the implementation of the model's passes (`ModelInfo.attention`). `keep`: keep nothing alive with it.
    """
    things: list[Any] = [*hooks_of(None)]
    values: list[Any] = [attention, *_options_of_torch()]
    seen: set[int] = set()
    describe(getattr(model, "config", None), values, things, seen)
    parts = dict.fromkeys(parts_of(model))
    unread = [*parts]
    while unread:
        part = unread.pop()
        kind: Any = own_class(part)
        things.append(getattr(kind, "forward", None))
        values.append(kind.__qualname__)
        before, attributes = len(things), part.__dict__
        things += hooks_of(part)
        children = dict(part.named_children())
        values += children
        things += children.values()
        for tensors in (dict(part.named_parameters(recurse=False)), dict(part.named_buffers(recurse=False))):
            if tensors:
                describe(tensors, values, things)
        for name, value in list(attributes.items()):  # another thread's pass may add some
            if name not in _SKIPPED:
                values.append(name)
                if type(value) in _PLAIN:  # the usual case, without a call
                    values += (type(value), value)
                else:
                    describe(value, values, things, seen)
        for module in things[before:]:
            if isinstance(module, torch.nn.Module) and module not in parts:  # in an attribute that is no part
                parts[module] = None
                unread.append(module)
    identities = Identities(things)
    return [identities.watch() if keep else identities, values]


def _options_of_torch() -> list[Any]:
    """Options of torch that choose between operations, or their precision."""
    backends: Any = torch.backends
    cuda, matmul = backends.cuda, backends.cuda.matmul
    return [
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_deterministic_debug_mode(),
        backends.fp32_precision,
        backends.mkldnn.matmul.fp32_precision,
        matmul.fp32_precision,
        matmul.allow_fp16_accumulation,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        cuda.preferred_blas_library(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.fp16_bf16_reduction_math_sdp_allowed(),
    ]
