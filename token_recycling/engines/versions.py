"""Checks that an engine is one that its adapter supports: its version, and the signatures it overrides or reads."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from .._util.versions import release

_OURS = "token_recycling"


def check_version(name: str, found: str, lowest: tuple[int, ...], beyond: tuple[int, ...]) -> None:
    """Raises RuntimeError unless the version `found` of an engine is at least `lowest` and before `beyond`."""
    if not lowest <= release(found) < beyond:
        first, later = (".".join(map(str, release)) for release in (lowest, beyond))
        raise RuntimeError(
            f"{name} must be >= {first} and < {later}, got {found}; install one of these, or a newer token-recycling"
        )


def check_signature(engine: str, name: str, function: Any, wanted: tuple[str, ...], more: bool = False) -> None:
    """Raises RuntimeError unless `function`, or None, has the parameters `wanted`; with `more`, others may follow."""
    found = tuple(inspect.signature(function).parameters) if function is not None else ()
    if (found[: len(wanted)] if more else found) != wanted:
        raise RuntimeError(
            f"{name} of {engine} must take ({', '.join(wanted)}{', ...' if more else ''}), got ({', '.join(found)}); "
            "this version is not supported"
        )


def check_attributes(engine: str, owner: type, names: Iterable[str]) -> None:
    """Raise RuntimeError unless objects of a class have these attributes: methods, fields, or names that occur in the
    code of a constructor, since nothing is constructed here.
    """
    known: set[str] = set()
    for each in owner.__mro__:
        own = vars(each)
        code = getattr(inspect.unwrap(own.get("__init__", owner)), "__code__", None)
        known |= {*own, *own.get("__annotations__", ()), *(code.co_names if code else ())}
    if absent := sorted(set(names) - known):
        raise RuntimeError(
            f"{owner.__name__} of {engine} has no {', '.join(absent)}, which token-recycling reads; "
            "this version is not supported"
        )


def wrap_once(
    engine: str,
    owner: Any,
    name: str,
    parameters: tuple[str, ...],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    more: bool = False,
) -> None:
    """Puts `wrap(function)` in the place of a function of a class or module, once a process; raises RuntimeError as
    `check_signature`.
    """
    original = getattr(owner, name, None)
    if getattr(original, _OURS, False):
        return
    check_signature(engine, f"{owner.__name__}.{name}", original, parameters, more)
    assert original is not None
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _OURS, True)
    setattr(owner, name, wrapped)
