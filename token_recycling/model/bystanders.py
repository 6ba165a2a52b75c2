"""Code of a call beside the model: processors, criteria and a streamer, which `generate` calls between forward passes.

A processor may read what a hook has stored of the last forward pass, switch what a hook does in the next one, change
the model, or read the cache. It can, since `generate` makes one pass for each token; here a pass covers several, and
the cache holds drafts. Such code is found by what it can reach (`reach`): objects that it shares with the code in the
model, modules of the model, and the cache. A call without code of this kind costs nothing.
"""

from __future__ import annotations

import dis
import functools
import itertools
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from contextvars import ContextVar
from queue import Queue, SimpleQueue
from threading import Event
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache

from .fingerprint import parts_of, place
from .foreign import Foreign
from .homes import is_own, name_of
from .reach import HOLDERS, Reach, reach_of
from .target import Target

_SHARED = (list, dict, set, bytearray, deque, torch.Tensor, np.ndarray, Event, Queue, SimpleQueue, ContextVar, *HOLDERS)
"""Classes whose objects pass on what one piece of code writes to another."""
_ADAPTERS = "peft."
_CHANGES = frozenset(
    {
        "set_adapter",
        "set_adapters",
        "enable_adapters",
        "disable_adapters",
        "enable_adapter",
        "disable_adapter",
        "enable_adapter_layers",
        "disable_adapter_layers",
        "add_adapter",
        "delete_adapter",
        "load_adapter",
        "merge_adapter",
        "unmerge_adapter",
        "merge_and_unload",
        "hotswap_adapter",
        "load_state_dict",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_module",
        "train",
        "resize_token_embeddings",
        "set_input_embeddings",
        "set_output_embeddings",
        "set_attn_implementation",
        "set_submodule",
        "add_module",
        "setattr",
    }
)
"""Names of methods that change a model."""
_WEIGHTS = frozenset({"weight", "bias", "data", "parameters", "named_parameters", "state_dict", "buffers"})
"""Names by which code comes to weights."""


def why_not(target: Target, foreign: Sequence[Foreign], beside: Sequence[Any], cache: Cache | None) -> str | None:
    """Return why calls with code beside the model must be left to `generate`, or None. `cache`: that of the caller, if
    the call has one.
    """
    if not beside:
        return None
    parts = {id(part) for part in parts_of(target.model)}
    in_model = [piece for piece in foreign if not str(getattr(piece.code, "__module__", "")).startswith(_ADAPTERS)]
    of_model = [(piece, reach_of(piece.code)) for piece in in_model]
    watched = {id(thing) for thing in (cache, *(cache.layers if cache is not None else ()))} - {id(None)}
    for code in beside:
        name, reach = name_of(code), reach_of(code, named=True)
        if watched & reach.objects.keys():
            return f"{name} reads the cache, which holds drafts between the steps of an accelerated call"
        holds_model = any(_holds(thing, parts) for thing in reach.objects.values())
        if holds_model and of_model:
            return f"{name} may read what {of_model[0][0].what} leaves in the model"
        if (holds_model and _changes_model(reach, target)) or _removes_hooks(reach) or _writes_weights(reach, target):
            return f"{name} may change the model between forward passes"
        for piece, other in of_model:
            if shared := _shared(reach, other):
                return f"{name} shares {shared} with {piece.what}, which sees other passes than those of generate"
    return None


def _holds(thing: Any, parts: Collection[int]) -> bool:
    """Whether an object is a module of the model, wraps one, as peft does, or has one, as a pipeline does."""
    if isinstance(thing, weakref.ref):
        thing = thing()
    if isinstance(thing, torch.nn.Module):
        return id(thing) in parts or any(id(module) in parts for module in thing.modules())
    attributes = getattr(thing, "__dict__", None) if is_own(type(thing).__module__) else None
    return isinstance(attributes, dict) and any(id(value) in parts for value in list(attributes.values()))


def _changes_model(reach: Reach, target: Target) -> bool:
    """Whether functions may set attributes of modules, write to weights, or call what changes a model."""
    names, stored = reach.names, _stored_in(reach, "STORE_ATTR", "DELETE_ATTR")
    writes_items = bool(_stored_in(reach, "STORE_SUBSCR")) or any(map(_in_place, names))
    if names & _CHANGES or (writes_items and names & _WEIGHTS):
        return True
    return bool(stored) and any(stored & _attributes_of(part) for part in parts_of(target.model))


def _in_place(name: str) -> bool:
    return name.endswith("_") and not name.startswith("_")


def _attributes_of(part: torch.nn.Module) -> set[str]:
    tensors = (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False))
    return {*vars(part), *(name for name, _ in (*part.named_children(), *tensors))}


def _writes_weights(reach: Reach, target: Target) -> bool:
    """Whether functions that reach weights, or the dictionaries of modules, may write to them."""
    if not _stored_in(reach, "STORE_SUBSCR") and not any(map(_in_place, reach.names)):
        return False
    weights = {place(weight) for weight in target.model.parameters()} - {0}
    held = {id(value) for part in parts_of(target.model) for value in vars(part).values() if isinstance(value, dict)}
    return any(
        id(thing) in held or (isinstance(thing, torch.Tensor) and place(thing) in weights)
        for thing in reach.objects.values()
    )


def _removes_hooks(reach: Reach) -> bool:
    return "remove" in reach.names and any(isinstance(thing, RemovableHandle) for thing in reach.objects.values())


def _shared(one: Reach, other: Reach) -> str | None:
    """Describe something through which two pieces of code may pass on values, or None."""
    stored = _stored_in(one, "STORE_ATTR", "DELETE_ATTR") | _stored_in(other, "STORE_ATTR", "DELETE_ATTR")
    passed_on = bool(stored & one.names & other.names) or "setattr" in one.names | other.names
    for thing in (one.objects[key] for key in one.objects.keys() & other.objects.keys()):
        kind = type(thing)
        if isinstance(thing, _SHARED):
            return f"a {kind.__name__}"
        if isinstance(thing, (type, ModuleType)):
            if passed_on and not is_own(getattr(thing, "__module__", thing.__name__)):
                return thing.__name__
        elif passed_on and not isinstance(thing, FunctionType) and not is_own(kind.__module__):
            return f"a {kind.__name__}"
    if "environ" in one.names & other.names:
        return "os.environ"
    (read, written), (also_read, also_written) = _variables_of(one), _variables_of(other)
    variables = (read | written) & (also_read | also_written) & (written | also_written)
    return f"the variable {min(name for _, name in variables)}" if variables else None


def _variables_of(reach: Reach) -> tuple[set[tuple[int, str]], set[tuple[int, str]]]:
    """Return the variables of closures and modules that functions read, and those that they write, by where they are
    and their name.
    """
    read: set[tuple[int, str]] = set()
    written: set[tuple[int, str]] = set()
    for function in reach.functions:
        cells = dict(zip(function.__code__.co_freevars, map(id, function.__closure__ or ()), strict=True))
        place = id(function.__globals__)
        read.update((cell, name) for name, cell in cells.items())
        for operation, name in operations_in(function.__code__):
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add((place, name))
            elif operation in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                written.add((place, name))
            elif operation == "STORE_DEREF" and name in cells:
                written.add((cells[name], name))
    return read, written


def _stored_in(reach: Reach, *operations: str) -> set[str]:
    """Return the names with which functions use some operations."""
    codes = (function.__code__ for function in reach.functions)
    return {name for code in codes for operation, name in operations_in(code) if operation in operations}


@functools.cache
def operations_in(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Return the operations of code, and of functions within it, that store something or read a variable of a module,
    with the names that they use.
    """
    own = [
        (one.opname, str(one.argval))
        for one in dis.get_instructions(code)
        if one.opname.startswith(("STORE_", "DELETE_")) or one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]
    within = [operations_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return (*own, *itertools.chain.from_iterable(within))
