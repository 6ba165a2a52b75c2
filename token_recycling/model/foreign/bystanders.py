"""Code next to the model: processors, criteria and a streamer, which `generate` calls between forward passes.

`generate` runs one forward pass per token. An accelerated pass covers several tokens, and the cache holds drafts. So a
call runs through `generate` if such code reaches the model, one of its weights or the caller's cache, if it may change
the model's configuration, or if the model runs foreign code, except that of adapters and trainers, with which it could
share state. The search follows all objects that the code holds and the globals that its functions name; in objects of
users' classes, only the attributes that are named. Processors of the grammar libraries hold no part of a model and are
not searched, nor are web frameworks, through which code that shows or sends text reaches the whole application.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from ..origin import home_of, is_of, is_own, name_of, package_of
from ..parts import parts_of
from .bytecode import operations_in
from .search import Foreign

GRAMMARS = frozenset({"xgrammar", "outlines", "outlines_core", "llguidance", "lmformatenforcer"})
"""Packages whose processors hold a grammar and no part of a model."""
_LIBRARIES = frozenset({"torch", "transformers", "accelerate"})
"""Packages whose functions are called by forward passes and `generate`."""
_MOST = 100_000
"""Maximum number of objects followed from one piece of code."""
_too_large: weakref.WeakSet[CodeType | type] = weakref.WeakSet()
"""Code of functions, and classes, that reached more objects in an earlier call: each search takes half a second."""
_FRAMEWORKS = frozenset(
    {
        *("streamlit", "gradio", "chainlit", "nicegui", "starlette", "fastapi", "uvicorn", "websockets", "flask"),
        *("werkzeug", "aiohttp", "tornado", "pydantic"),
    }
)
"""Web frameworks, whose objects lead to all functions of an application, and pydantic, whose objects list all their
attributes.
"""
_SEARCHES = frozenset({"gc", "inspect", "_getframe", "import_module", "session_state"})
"""Names by which code finds objects that it does not hold."""
_EVALUATING = frozenset({"eval", "exec", "globals", "__import__"})
"""Builtin functions that find objects by a name in a string."""
_THREADS = frozenset({"threading", "_thread", "concurrent.futures.thread", "logging", "_asyncio", "_io"})
"""Modules whose objects lead to all threads, tasks, handlers or files of the process, as event loops do."""
_ANY_NAME = frozenset({"__dict__", "__getattribute__", "vars", "attrgetter", "__getstate__"})
"""Names by which code reads attributes without naming them."""
_SETTING = frozenset({"setattr", "__setattr__", "__delattr__", "update"})
"""Names by which code sets attributes without naming them."""
_NOT_FOLLOWED = frozenset({"__init__", "__dict__", "__weakref__", "__repr__", "__str__", "__eq__", "__hash__"})
"""Members of users' classes that only construct, describe or compare; those of dataclasses name all attributes."""
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_DATA = frozenset({list, tuple, dict, set, frozenset})
"""Types of containers that hold nothing except their items."""
_NUMBERS = frozenset({type(None), bool, int, float, complex, str, bytes})
_ATOMS = (*_NUMBERS, bytearray, CodeType, PreTrainedTokenizerBase)


def why_not(
    model: PreTrainedModel, foreign: Sequence[Foreign], beside: Sequence[Any], cache: Cache | None
) -> str | None:
    """Return why a call with code `beside` the model must run through `generate`, or None. `cache`: the caller's, if
    the call has one.
    """
    beside = [code for code in beside if not is_of(code, GRAMMARS)]
    in_model = [piece for piece in foreign if not piece.is_known]
    if beside and in_model:
        shared = f"{name_of(beside[0])} may share state with {in_model[0].description}"
        return f"{shared}, which sees forward passes that generate would not run"
    caches = {id(item) for item in (cache, *(cache.layers if cache is not None else ()))} - {id(None)}
    parts, memory = parts_of(model), memory_of((*model.parameters(), *model.buffers()))
    of_model = {
        id(item) for part in parts for item in (part, *vars(part).values()) if type(item) is dict or item is part
    }
    configs = {id(item) for part in parts for item in vars(part).values() if isinstance(item, PretrainedConfig)}
    for code in beside:
        configs_reached, functions = list[PretrainedConfig](), list[FunctionType]()
        too_much = f"{name_of(code)} reaches too much to rule out the model"
        written = getattr(getattr(code, "__func__", code), "__code__", type(code))
        if written in _too_large:
            return too_much
        for count, item in enumerate(_reached(code)):
            if id(item) in caches:
                return f"{name_of(code)} reads the cache, which holds drafts between the steps of an accelerated call"
            if id(item) in of_model or (isinstance(item, torch.Tensor) and memory & memory_of([item])):
                return f"{name_of(code)} reaches the model, which it may change between forward passes"
            if isinstance(item, FunctionType) and (changed := _changes_libraries(item)):
                return f"{name_of(code)} changes {changed} between forward passes"
            if count >= _MOST and (isinstance(written, CodeType) or not is_own(written.__module__)):
                _too_large.add(written)
            if count >= _MOST or (isinstance(item, FunctionType) and _searches(item)):
                return too_much
            if id(item) in configs:
                configs_reached.append(item)
            elif isinstance(item, FunctionType) and not is_own(item.__globals__.get("__name__")):
                functions.append(item)
        for config, function in itertools.product(configs_reached, functions):
            if _may_set(function, config):
                return f"{name_of(code)} may change the model's configuration between forward passes"
    return None


def memory_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the addresses of the storages that tensors are views of."""
    addresses = set()
    for tensor in tensors:
        with contextlib.suppress(RuntimeError, NotImplementedError):  # wrapper tensors have no storage
            addresses.add(tensor.untyped_storage().data_ptr())
    return addresses - {0}


def _reached(code: Any) -> Iterator[Any]:
    """Yield all objects that code can reach, itself included; of users' objects, only the attributes that it names."""
    seen: dict[int, Any] = {}
    constructed: set[type] = set()
    names = _called_on(type(code))
    unread: list[Any] = [code]
    attributes: list[tuple[str, Any]] = []
    while unread:
        item = unread.pop()
        if id(item) not in seen and not isinstance(item, _ATOMS) and not _is_closed(item):
            seen[id(item)] = item
            yield item
            if type(item) in _DATA:  # a vocabulary or a prefix tree has many, which every call follows
                unread += [value for value in gc.get_referents(item) if type(value) not in _NUMBERS]
            elif isinstance(item, type) or _is_read_by_names(item):
                attributes += _attributes(item)
                if not isinstance(item, type):
                    constructed.update(type(item).__mro__)
                elif item not in constructed:  # code may create an object of the class
                    unread += filter(_is_of_user, [inspect.getattr_static(item, "__init__")])
            else:
                if isinstance(item, FunctionType) and not _is_of_framework(item):
                    names |= _names_in(item)
                unread += _next_to(item)
        if not unread:
            named = [name in names or name.startswith("__") for name, _ in attributes]
            unread = [value for (_, value), follow in zip(attributes, named, strict=True) if follow]
            attributes = [item for item, follow in zip(attributes, named, strict=True) if not follow]


def _called_on(cls: type) -> set[str]:
    """Return the methods that `generate` calls on a streamer, and those that transformers' base classes define."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("transformers.")]
    return {"put", "end"}.intersection(dir(cls)).union(*map(vars, bases))


def _is_of_framework(item: Any) -> bool:
    """Return whether a function, class or object is written in one of `_FRAMEWORKS`."""
    if isinstance(item, FunctionType):
        return package_of(item.__globals__.get("__name__")) in _FRAMEWORKS
    return package_of((item if isinstance(item, type) else type(item)).__module__) in _FRAMEWORKS


def _is_closed(item: Any) -> bool:
    """Return whether a web framework's object or class is not searched; its functions may wrap a user's."""
    return not isinstance(item, FunctionType) and _is_of_framework(item)


def _is_read_by_names(item: Any) -> bool:
    """Return whether an object is a user's, of which code reaches the attributes that it names."""
    return not is_own(type(item).__module__) and not isinstance(item, torch.nn.Module)


def _attributes(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes of an object of a user's class, and of the class except `_NOT_FOLLOWED`, by name."""
    cls = item if isinstance(item, type) else type(item)
    written = [base for base in cls.__mro__ if not is_own(home_of(base))]  # or a library's, with replaced methods
    if cls is not item:
        members = [member for base in written for member in vars(base).items()]
        functions = [value for name, value in members if isinstance(value, FunctionType) and name != "__init__"]
        followed = [function for function in functions if not _is_of_framework(function)]
        if isinstance(item, _CONTAINERS) or any(_names_in(function) & _ANY_NAME for function in followed):
            yield from (("__all__", referent) for referent in gc.get_referents(item))
        yield from list((_own_attributes(item) or {}).items())
    for base in written:
        for name, value in list(vars(base).items()):
            if isinstance(value, MemberDescriptorType):  # of __slots__
                yield name, _slot(value, item) if cls is not item else None
            elif name not in _NOT_FOLLOWED:
                yield name, value


def _next_to(item: Any) -> Iterable[Any]:
    """Return the objects that a function or an object of a library refers to directly."""
    if isinstance(item, FunctionType):
        inner = [item.__closure__, item.__defaults__, item.__kwdefaults__, item.__dict__]
        # A framework's function may wrap a user's: only the objects that it holds are followed.
        if not is_own(item.__globals__.get("__name__")) and not _is_of_framework(item):
            names = _names_in(item)
            inner += [item.__globals__.get(name, sys.modules.get(name)) for name in names]
            modules = [value for value in inner if isinstance(value, ModuleType) and not is_own(value.__name__)]
            inner += [vars(module).get(name) for module in modules for name in names]
        return inner
    if isinstance(item, weakref.ReferenceType):
        return (item(),)
    if type(item) in weakref.ProxyTypes:
        try:
            return (item.__repr__.__self__,)
        except ReferenceError:
            return ()
    if isinstance(item, np.ndarray):
        return (item.base,)
    if isinstance(item, ContextVar):
        try:
            return (item.get(),)
        except LookupError:
            return ()
    if isinstance(item, (ModuleType, asyncio.AbstractEventLoop)) or (
        type(item).__module__ in _THREADS and not isinstance(item, threading.local)
    ):
        return ()
    return (*gc.get_referents(item), _own_attributes(item))


def _own_attributes(item: Any) -> dict[str, Any] | None:
    """Return the attributes of an object without running code of its class."""
    with contextlib.suppress(AttributeError, TypeError):
        attributes: dict[str, Any] = object.__getattribute__(item, "__dict__")
        return attributes
    return None


def _slot(descriptor: MemberDescriptorType, item: Any) -> Any:
    with contextlib.suppress(AttributeError):
        return descriptor.__get__(item)
    return None


def _names_in(function: FunctionType) -> frozenset[str]:
    """Return the names that a function uses, and constants that could be names. Names that no source code can contain,
    such as those that pytest generates for assertions, are left out.
    """
    operations = operations_in(function.__code__)
    return frozenset(filter(str.isidentifier, operations.globals | operations.attributes | operations.strings))


def _searches(function: FunctionType) -> bool:
    """Return whether a function finds objects that it does not hold. Libraries do so for messages and are exempt."""
    evaluates = operations_in(function.__code__).globals & _EVALUATING
    return _is_of_user(function) and bool(_names_in(function) & _SEARCHES or evaluates)


def _is_of_user(function: Any) -> bool:
    """Return whether an object is a function that is not from a library."""
    if not isinstance(function, FunctionType) or is_own(home_of(function)):
        return False
    return "site-packages" not in function.__code__.co_filename


def _may_set(function: FunctionType, holder: Any) -> bool:
    """Return whether a function sets an attribute that an object has, or one by a name that its code does not show."""
    operations = operations_in(function.__code__)
    by_name = (operations.globals | operations.attributes) & _SETTING
    return bool(by_name) or any(
        operation in ("STORE_ATTR", "DELETE_ATTR") and hasattr(holder, name) for operation, name in operations.stores
    )


def _changes_libraries(function: FunctionType) -> str | None:
    """Return the name of the library module or class on which a function sets an attribute, or None."""
    if is_own(function.__globals__.get("__name__")):
        return None
    for name in operations_in(function.__code__).set_on:
        holder = function.__globals__.get(name)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if name in cells:
            holder = getattr(cells[name], "cell_contents", None)
        if isinstance(holder, (type, ModuleType)):
            home = str(getattr(holder, "__module__", None) or holder.__name__)
            if home.partition(".")[0] in _LIBRARIES:
                return holder.__name__
    return None
