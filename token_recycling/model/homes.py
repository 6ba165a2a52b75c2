"""Where code is written: in transformers, torch and this package, or in another package, which may do anything."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import FunctionType, MethodType
from typing import Any

_OWN = frozenset({"transformers", "torch", "accelerate", "token_recycling", "builtins", *sys.stdlib_module_names})
"""Packages whose code treats rows alike, or is known to the rest of this package where it does not."""


@functools.cache
def is_own(package: str | None) -> bool:
    """Whether code of a module, by the module's name, is no foreign code."""
    return package is None or package.partition(".")[0] in _OWN


def home_of(function: Any) -> str | None:
    """Return the name of the module that a function, method, partial or callable object is written in; None for one of
    a compiled language. A wrapper is written where its own code is, whatever it wraps; wrappers of torch do not count.
    A class is written where its methods are, whatever module it names.
    """
    kind = type(function)
    if kind is FunctionType:
        home = str(function.__globals__.get("__name__"))
        wrapped = function.__dict__.get("__wrapped__")  # as by torch.compile, or torch.no_grad
        return home_of(wrapped) if wrapped is not None and home.startswith("torch.") else home
    if kind is MethodType:
        return home_of(function.__func__)
    if isinstance(function, functools.partial):
        return home_of(function.func)
    if isinstance(function, type):
        return _home_of_class(function)
    if kind.__module__ == "builtins":
        return getattr(function, "__module__", None)
    return _home_of_class(kind)


def _home_of_class(kind: type) -> str:
    methods = [value for value in vars(kind).values() if type(value) is FunctionType]
    homes = {str(method.__globals__.get("__name__")) for method in methods}
    package = kind.__module__.partition(".")[0]
    others = [home for home in homes if not is_own(home) and home.partition(".")[0] != package]
    return min(others, default=kind.__module__)


def is_foreign(function: Any) -> bool:
    """Whether a function or callable object is foreign code."""
    return not is_own(home_of(function))


def name_of(function: Any) -> str:
    """Return the qualified name of a function or callable object and the module that it is written in."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{name} ({home_of(function)})"


def code_beside(things: Iterable[Any]) -> list[Any]:
    """Return the code of users or other libraries among processors, criteria and streamers: the objects themselves, or
    functions that an object of transformers calls.
    """
    found = []
    for thing in things:
        if is_foreign(thing):
            found.append(thing)
        elif not str(type(thing).__module__).startswith("token_recycling."):
            found += [
                value for value in getattr(thing, "__dict__", {}).values() if callable(value) and is_foreign(value)
            ]
    return found
