"""Origin of code: transformers, torch and this package, or another package, which may do anything."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Collection, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

_OF_MODELS = frozenset({"transformers", "torch", "accelerate", "token_recycling"})
"""Packages that models consist of."""
_OWN = _OF_MODELS | sys.stdlib_module_names - {"unittest"}  # whose mocks record calls
"""Packages whose code treats rows alike; cases where it does not are handled elsewhere in this package."""
_WRAPPING = frozenset({"torch", *sys.stdlib_module_names}) - {"builtins"}
"""Packages whose objects call functions passed to them: mocks, contexts used as decorators, custom operators."""


def package_of(module: str | None) -> str:
    """Return the package of a module, given the module's name."""
    return str(module).partition(".")[0]


@functools.cache
def is_own(module: str | None) -> bool:
    """Return whether code of a module, given its name, is not foreign."""
    return module is None or package_of(module) in _OWN


def home_of(function: Any) -> str | None:
    """Return the name of the module in which a function, method, property or callable object is written; None for
    compiled code. A wrapper is written where its own code is, whatever it wraps. For wrappers of Python, torch and
    transformers, the objects that they wrap, are bound to and hold count instead. A class that names a library as its
    home is written where its methods are.
    """
    seen, unread = set(), [function]
    for code in unread:  # the list grows in the loop
        if id(code) not in seen:
            seen.add(id(code))
            if not is_own(home := _own_home(code)):
                return home
            unread += _run_by(code)
    return _own_home(function)


def _own_home(function: Any) -> str | None:
    """Return the module in which a function or object itself is written, whatever it holds."""
    cls = type(function)
    if cls is FunctionType:
        return str(function.__globals__.get("__name__"))
    if not isinstance(function, type) and cls.__module__ == "builtins":
        return getattr(function, "__module__", None)
    written = function if isinstance(function, type) else cls
    if not is_own(written.__module__):
        return written.__module__
    bases = [base for base in written.__mro__ if base is written or not is_own(base.__module__)]
    return min((home for base in bases for home in _homes_of_methods(base) if not is_own(home)), default=cls.__module__)


def _run_by(function: Any) -> Iterator[Any]:
    """Yield code that a function, method, property or library object runs: what it wraps, is bound to, or holds."""
    cls = type(function)
    if cls is FunctionType:
        yield from filter(None, [function.__dict__.get("__wrapped__")])  # set by torch.compile or torch.no_grad
        yield from held_by(function)
    elif cls in (MethodType, staticmethod, classmethod):
        yield function.__func__
        yield from filter(is_code, [getattr(function, "__self__", None)])
    elif cls is property:
        yield from (accessor for accessor in (function.fget, function.fset) if accessor is not None)
    elif cls.__module__ == "functools":  # partial, partialmethod, cached_property, lru_cache wrappers
        yield _within(function)
        given = (*getattr(function, "args", ()), *getattr(function, "keywords", {}).values())
        yield from (type(item) if isinstance(item, torch.nn.Module) else item for item in given if is_code(item))
    elif isinstance(function, torch.nn.Module):
        yield from function.children()
    elif not isinstance(function, type) and package_of(cls.__module__) in _WRAPPING:
        yield from filter(is_code, list(getattr(function, "__dict__", {}).values()))


def held_by(function: FunctionType) -> Iterator[Any]:
    """Yield callable objects in the closure of a function, except modules, such as those of torch's parametrizations: a
    model's own modules are searched separately.
    """
    for cell in function.__closure__ or ():
        content = getattr(cell, "cell_contents", None)
        if is_code(content) and not isinstance(content, torch.nn.Module):
            yield content


def _homes_of_methods(cls: type) -> set[str]:
    return {str(value.__globals__.get("__name__")) for value in vars(cls).values() if type(value) is FunctionType}


def is_of(function: Any, packages: Collection[str]) -> bool:
    """Return whether a function, object or class, with all its base classes, is written only in `packages` and own
    ones. A class is written where its methods are; one without methods must be defined where it says.
    """
    cls = function if isinstance(function, type) else type(function)
    if is_own(cls.__module__):
        return package_of(home_of(function)) in packages
    bases = [base for base in cls.__mro__ if not is_own(base.__module__)]
    homes = {home for base in bases for home in (base.__module__, *_homes_of_methods(base)) if not is_own(home)}
    return {*map(package_of, homes)} <= {*packages} and all(
        _homes_of_methods(base) or _is_there(base) for base in bases
    )


def _is_there(cls: type) -> bool:
    """Return whether the module that a class names as its home defines the class."""
    try:
        return operator.attrgetter(cls.__qualname__)(sys.modules.get(cls.__module__)) is cls
    except AttributeError:
        return False


def is_foreign(function: Any) -> bool:
    """Return whether a function or callable object is foreign code."""
    return not is_own(home_of(function))


def is_foreign_hook(hook: Any) -> bool:
    """Return whether a hook is foreign. Functions of Python's standard library count too: `print`, a queue's `put`."""
    return is_foreign(hook) or package_of(home_of(_innermost(hook))) not in _OF_MODELS


def is_code(value: Any) -> bool:
    """Return whether a value runs where it is used: a function, in any wrapper, a property, a callable object or a
    descriptor, but not a class.
    """
    return not isinstance(value, type) and (callable(value) or hasattr(type(value), "__get__"))


def _within(wrapper: Any) -> Any:
    """Return the function inside an object of functools."""
    return getattr(wrapper, "func", getattr(wrapper, "__wrapped__", None))


def _innermost(function: Any) -> Any:
    """Return the function inside all functools wrappers."""
    while type(function).__module__ == "functools":
        function = _within(function)
    return function


def name_of(function: Any) -> str:
    """Return the qualified name of a function or callable object, and the module in which it is written."""
    inner = _innermost(function)
    inner = inner.fget if isinstance(inner, property) else inner
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{name} ({home_of(function)})"
