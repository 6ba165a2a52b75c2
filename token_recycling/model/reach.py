"""All that a piece of foreign code can reach: the functions that it may call, and the variables that it may read or
write.

A hook that adds a vector may take its strength from an attribute of an object, from a global variable of another
module or from a helper function. Code does the same as long as all these hold the same (`trial`); code that changes one
of them from pass to pass may decide by it. Functions are followed by the names that code uses, objects by their
attributes, including those of their class.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import PretrainedConfig

from .compat import times_written
from .fingerprint import describe, parts_of, place
from .foreign import (
    ATTRIBUTES_OF_TORCH,
    Foreign,
    decides,
    functions_in,
    is_own_class,
    names_in,
    own_attributes,
    own_class,
)
from .homes import home_of, is_own
from .target import Target

_MOST = 2000
"""Most things that are followed from one piece of code."""
_DEEP = 5
"""Steps from object to object that are followed."""
_FEW = 16
"""Items of a container that are followed."""
HOLDERS = (SimpleNamespace, Namespace, threading.local)
"""Classes of the standard library whose objects hold the attributes that users give them."""
_MOST_NUMBERS = 24
"""Numbers that are tried."""
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8}
_ENVIRONMENT = {"environ", "getenv"}
_MISSING = object()
_ADAPTERS = "peft."
"""Where the modules of a library are whose code reads nothing but the modules that it belongs to."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, dict, set, tuple, deque)
_SMALL = 4096
"""Numbers of a tensor that are looked at in every call; of others, where torch has counted a write."""


@dataclass(frozen=True, eq=False)
class Variable:
    """A variable that code may read or write: of a closure or a module, or an attribute of an object or a class."""

    name: str
    """Distinct within one piece of code."""
    read: Callable[[], Any]
    """Returns its value; None where there is none."""
    write: Callable[[Any], None]


@dataclass(eq=False)
class Reach:
    """What a piece of code can reach."""

    functions: list[FunctionType] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    holders: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Attributes of the objects that it can reach, which may get new ones, and how names of such variables begin."""
    objects: dict[int, Any] = field(default_factory=dict)
    """All that it can reach, by identity."""

    @property
    def names(self) -> set[str]:
        """Names that the functions use, those in strings included."""
        codes = [function.__code__ for function in self.functions]
        strings = {value for code in codes for value in filter(_is_name, _constants_in(code))}
        return {name for code in codes for name in names_in(code)} | strings


def reach_of(code: Any, objects: Mapping[str, Any] | None = None, *, named: bool = False) -> Reach:
    """Return what a function, method, partial, callable object or class reaches, and what it reaches through `objects`,
    which it knows by these names. Of a class these are all methods. `named`: attributes of objects count only where the
    code uses their names after the object was made.
    """
    return _Walk(code, objects or {}, named).reach


def objects_in(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are objects of a user's classes, or containers of such."""
    return {name: value for name, value in own_attributes(module).items() if _leads_on(value)}


def _leads_on(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return any(map(_leads_on, itertools.islice(value.values() if isinstance(value, dict) else value, _FEW)))
    if isinstance(value, (torch.nn.Module, PretrainedConfig)):
        return False
    return isinstance(value, HOLDERS) or not is_own(type(value).__module__)


class _Walk:
    def __init__(self, code: Any, objects: Mapping[str, Any], named: bool) -> None:
        self.reach = Reach()
        self._seen = self.reach.objects
        self._named = named
        self._unread: deque[tuple[str, Any, int]] = deque([("", code, 0)])
        self._unread.extend((name, thing, 1) for name, thing in objects.items())
        self._waiting: list[tuple[str, Callable[[], None]]] = []
        """Methods and attributes that are followed once their names have come up."""
        self._names: set[str] = set()
        whole = isinstance(code, type) or not isinstance(code, (FunctionType, MethodType, functools.partial))
        while self._unread or self._follow_named():
            if not self._unread:
                continue
            path, thing, depth = self._unread.popleft()
            if id(thing) not in self._seen and depth <= _DEEP and len(self._seen) < _MOST:
                self._seen[id(thing)] = thing
                self._follow(path, thing, depth, whole=whole and depth == 0)

    def _follow_named(self) -> bool:
        """Go on with methods and attributes whose names have come up; whether there are any."""
        named = [follow for name, follow in self._waiting if name in self._names]
        self._waiting = [(name, follow) for name, follow in self._waiting if name not in self._names]
        for follow in named:
            follow()
        return bool(named)

    def _when_named(self, name: str, follow: Callable[[], None]) -> None:
        """Follow an attribute, where only names that the code uses count once its name has come up."""
        if self._named:
            self._waiting.append((name, follow))
        else:
            follow()

    def _variable(self, name: str, depth: int, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self.reach.variables.append(Variable(name, read, write))
        self._unread.append((name, read(), depth + 1))

    def _item(self, path: str, holder: dict[str, Any], name: str, depth: int) -> None:
        self._variable(path + name, depth, lambda: holder.get(name), lambda value: holder.__setitem__(name, value))

    def _attribute(self, path: str, holder: Any, name: str, depth: int) -> None:
        self._variable(
            path + name, depth, lambda: getattr(holder, name, None), lambda value: setattr(holder, name, value)
        )

    def _follow(self, path: str, thing: Any, depth: int, whole: bool) -> None:
        if isinstance(thing, functools.partial):
            self._unread.extend((path, part, depth) for part in (thing.func, *thing.args))
            for name in thing.keywords:
                self._item(path, thing.keywords, name, depth)
        elif isinstance(thing, MethodType) and isinstance(thing.__func__, FunctionType):
            self._unread.extend([(path, thing.__func__, depth), (path, thing.__self__, depth)])
        elif isinstance(thing, (staticmethod, classmethod)):
            self._unread.append((path, thing.__func__, depth))
        elif isinstance(thing, property):
            self._unread.extend((path, part, depth) for part in (thing.fget, thing.fset) if part is not None)
        elif isinstance(thing, FunctionType):
            if depth == 0 or not is_own(home_of(thing)):
                self._function(thing, depth)
        elif isinstance(thing, type):
            if not is_own(thing.__module__):
                self._class(path, thing, depth, whole)
        elif isinstance(thing, (list, tuple, set, frozenset, deque)):
            self._unread.extend((f"{path}[]", item, depth + 1) for item in [*thing][:_FEW])
        elif isinstance(thing, Mapping) and is_own(type(thing).__module__):
            self._unread.extend((f"{path}[]", item, depth + 1) for item in [*thing.values()][:_FEW])
        elif not isinstance(thing, (torch.Tensor, ModuleType, PretrainedConfig)):
            self._object(path, thing, depth, whole)

    def _function(self, function: FunctionType, depth: int) -> None:
        self.reach.functions.append(function)
        path = f"{function.__qualname__}: "
        names = [*dict.fromkeys(names_in(function.__code__))]
        self._names.update(names)
        if self._named:
            self._names.update(filter(_is_name, _constants_in(function.__code__)))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._variable(path + name, depth, functools.partial(_content, cell), functools.partial(_fill, cell))
        for number, value in enumerate(function.__defaults__ or ()):
            self._variable(f"{path}default {number}", depth, functools.partial(_same, value), _keep)
        for holder in (function.__kwdefaults__ or {}, function.__dict__):
            for name in holder:
                self._item(path, holder, name, depth)
        self.reach.holders.append((path, function.__dict__))
        for name in names:
            value = function.__globals__.get(name, _MISSING)
            if isinstance(value, ModuleType):
                if not is_own(value.__name__):
                    for attribute in names:
                        if not isinstance(vars(value).get(attribute, value), ModuleType):
                            self._item(f"{value.__name__}.", vars(value), attribute, depth)
            elif value is not _MISSING:
                self._item(f"{function.__module__}.", function.__globals__, name, depth)
        if _ENVIRONMENT & {*names}:
            self.reach.variables.append(Variable("os.environ", lambda: dict(os.environ), _keep))

    def _class(self, path: str, kind: type, depth: int, whole: bool) -> None:
        for base in kind.__mro__:
            if is_own(base.__module__):
                continue
            for name, value in list(vars(base).items()):
                if isinstance(value, (FunctionType, staticmethod, classmethod, property)):
                    follow = functools.partial(self._unread.append, (path, value, depth))
                    called = whole or name.startswith("__")
                    if called and (name != "__init__" or (whole and not self._named)):
                        follow()
                    else:
                        self._waiting.append((name, follow))
                elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                    holder = f"{base.__qualname__}."
                    self._when_named(name, functools.partial(self._attribute, holder, base, name, depth))

    def _object(self, path: str, thing: Any, depth: int, whole: bool) -> None:
        if isinstance(thing, ContextVar):
            self.reach.variables.append(Variable(f"{path} {thing.name}", lambda: thing.get(None), _keep))
            return
        kind = type(thing)
        bound = getattr(thing, "__self__", None)
        if callable(thing) and bound is not None and not isinstance(bound, ModuleType):  # a method of a compiled class
            self._variable(f"{path}.__self__", depth, functools.partial(_same, bound), _keep)
            return
        own = is_own(kind.__module__)
        if own and not isinstance(thing, HOLDERS):
            return
        attributes = getattr(thing, "__dict__", None)
        if isinstance(attributes, dict):
            self.reach.holders.append((f"{path}.", attributes))
            for name in own_attributes(thing):
                self._when_named(name, functools.partial(self._item, f"{path}.", attributes, name, depth))
            for name in _buffers_of(thing):
                self._when_named(name, functools.partial(self._attribute, f"{path}.", thing, name, depth))
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if not name.startswith("__"):
                    self._when_named(name, functools.partial(self._attribute, f"{path}.", thing, name, depth))
        if not own:
            self._unread.append((path, kind, depth))
            self._class(path, kind, depth, whole)
            self._seen[id(kind)] = kind


def variables_of_modules(modules: Collection[torch.nn.Module], names: Collection[str]) -> Iterator[Variable]:
    """Attributes and buffers with some of the `names` of modules that are in a model."""
    for number, module in enumerate(modules):
        attributes = module.__dict__
        for name in (attributes.keys() & names) - ATTRIBUTES_OF_TORCH:
            read, write = functools.partial(attributes.get, name), functools.partial(attributes.__setitem__, name)
            yield Variable(f"{number}.{name}", read, write)
        for name in _buffers_of(module):
            if name in names:
                read, write = functools.partial(getattr, module, name, None), functools.partial(setattr, module, name)
                yield Variable(f"{number}.{name}", read, write)


def _buffers_of(thing: Any) -> list[str]:
    """Names of a module's own buffers; of one that was never initialised, and of anything else, none."""
    if not isinstance(thing, torch.nn.Module) or "training" not in vars(thing):
        return []
    return [name for name, _ in thing.named_buffers(recurse=False)]


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def _same(value: Any) -> Any:
    return value


def _fill(cell: Any, value: Any) -> None:
    cell.cell_contents = value


def _keep(value: Any) -> None:
    """What cannot be written is changed in place or not at all."""


def numbers_in(foreign: Iterable[Foreign]) -> list[int]:
    """Integers that foreign code reaches: ids of tokens, numbers of rows or positions by which it may decide."""
    numbers: dict[int, None] = {}

    def add(value: Any, depth: int = 0) -> None:
        if isinstance(value, bool) or depth > 2:
            return
        if isinstance(value, int):
            numbers[value] = None
        elif isinstance(value, torch.Tensor) and value.numel() and value.dtype in _INTEGERS:
            for item in value.flatten()[:_FEW].tolist():
                add(item, depth + 1)
        elif isinstance(value, Mapping):
            for item in itertools.islice(value.items(), _FEW):
                add(item, depth + 1)
        elif isinstance(value, (list, tuple, set, frozenset, range)):
            for item in itertools.islice(value, _FEW):
                add(item, depth + 1)

    for piece in foreign:
        reach = reach_of(piece.code)
        for function in reach.functions:
            for constant in _constants_in(function.__code__):
                add(constant)
        for variable in reach.variables:
            add(variable.read())
        if piece.module is not None:
            for value in own_attributes(piece.module).values():
                add(value)
    return [number for number in numbers if number > 1][:_MOST_NUMBERS]


def _constants_in(code: CodeType) -> Iterator[Any]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants_in(constant)
        else:
            yield constant


# Whether code does the same as before


def volatile_in(target: Target) -> set[tuple[str, str]]:
    """Return descriptions of code, and names of its variables, that forward passes have changed: counters and logs."""
    return target.kept.get("volatile", set, values_matter=False)


def form_of(
    target: Target, piece: Foreign, volatile: Collection[tuple[str, str]], known: dict[tuple[int, int], CodeReach]
) -> Hashable:
    """Return something equal for code that does the same, whatever it counts in its `volatile` variables. The tensors
    and objects that it reaches count where it may decide by them: another steering vector is no other code, unless all
    of its numbers are the same, such as 0.
    """
    reached = reached_by(target, piece, known)
    values, things = reached.described({name for _, name in volatile})
    if piece.module is not None and not is_own_class(own_class(piece.module)):
        values, things = [*values, piece.module.training], [*things]
        attributes = [*own_attributes(piece.module).items(), *piece.module.named_parameters(recurse=False)]
        attributes += piece.module.named_buffers(recurse=False)
        changing = {name for what, name in volatile if what == piece.what}
        _describe_variables(target, attributes, reached.decides, changing, values, things)
    return piece.what, reached.codes, tuple(values), tuple(map(id, things))


def _describe_variables(
    target: Target,
    variables: Iterable[tuple[str, Any]],
    decides: bool,
    volatile: Collection[str],
    values: list[Any],
    things: list[Any],
) -> None:
    """Add variables, but for `volatile` ones, to `values` and `things` as `fingerprint.describe` does."""
    for name, value in variables:
        if name in volatile or isinstance(value, (FunctionType, ModuleType)):
            continue
        if isinstance(value, torch.Tensor) and (not decides or isinstance(value, torch.nn.Parameter)):
            values += (name, value.shape, _only_number(target, value))
        elif decides or isinstance(value, _PLAIN):
            values.append(name)
            describe([*value] if isinstance(value, deque) else value, values, things)


class CodeReach:
    """What a piece of code and the modules of its model give it to read, looked up once for a call."""

    def __init__(self, target: Target, piece: Foreign) -> None:
        self._target = target
        self._described: tuple[list[Any], list[Any]] | None = None
        if str(home_of(piece.code)).startswith(_ADAPTERS):
            reach = Reach([*functions_in(piece.code)])
            self.names: set[str] = set()
        else:
            reach = reach_of(piece.code, _objects_of(piece))
            self.names = reach.names
        self.holders = reach.holders
        self.variables = [*reach.variables, *variables_of_modules(parts_of(target.model), self.names)]
        self.codes = tuple(function.__code__ for function in reach.functions)
        self.decides = decides(reach.functions)

    def described(self, volatile: Collection[str]) -> tuple[list[Any], list[Any]]:
        """Describe the values of the variables, but for `volatile` ones."""
        if self._described is None:
            values: list[Any] = []
            things: list[Any] = []
            reads = ((variable.name, variable.read()) for variable in self.variables)
            _describe_variables(self._target, reads, self.decides, volatile, values, things)
            self._described = values, things
        return self._described


def _objects_of(piece: Foreign) -> dict[str, Any]:
    if piece.module is None:
        return {}
    kind = own_class(piece.module)
    return {} if is_own_class(kind) or kind.__module__.startswith(_ADAPTERS) else objects_in(piece.module)


def reached_by(target: Target, piece: Foreign, known: dict[tuple[int, int], CodeReach]) -> CodeReach:
    """Return what a piece of code reaches, alike for all modules of a class that hold no objects of their own."""
    key = id(piece.code), id(piece.module) if _objects_of(piece) else 0
    if key not in known:
        known[key] = CodeReach(target, piece)
    return known[key]


def _only_number(target: Target, tensor: torch.Tensor) -> float | None:
    """Return the number that a tensor is full of, or None: zeros can hide what code does with other numbers."""
    known: dict[int, tuple[Any, ...]] = target.kept.get("numbers of tensors", dict, values_matter=False)
    form = times_written([tensor]), place(tensor)
    of, before, number = known.get(id(tensor), (None, None, None))
    if of is None or of() is not tensor or before != form or tensor.numel() <= _SMALL:
        number = None
        if tensor.numel() and not tensor.is_complex() and not tensor.is_meta:
            least, most = tensor.detach().aminmax()
            number = float(least) if bool(least == most) else None
        known[id(tensor)] = weakref.ref(tensor), form, number
    return number
