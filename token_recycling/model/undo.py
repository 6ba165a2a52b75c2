"""Values as they were: what code has changed is found and put back.

Containers, tensors and arrays are copied with what is in them; of generators of random numbers the state is. A Python
generator cannot be copied.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from queue import Queue
from types import GeneratorType
from typing import Any

import numpy as np
import torch

from .fingerprint import parts_of
from .foreign import Foreign, own_attributes
from .reach import CodeReach, Variable, reached_by, volatile_in
from .target import Target

_DEEP = 4
"""Containers within each other that are copied."""
_MANY = 10_000
"""Items of a container that are copied one by one."""

_STATES: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    Queue: (lambda queue: [*queue.queue], lambda queue, items: (queue.queue.clear(), queue.queue.extend(items))),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: copy.deepcopy(generator.bit_generator.state),
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
"""How the state of a generator of random numbers, or of a queue, is read and written."""


class Saved:
    """A value as it was."""

    def __init__(self, value: Any, depth: int = 0) -> None:
        self.value = value
        self._copy: Any = None
        self._parts: list[Saved] = []
        state = _state_of(value)
        if state is not None:
            self._copy = state[0](value)
        elif isinstance(value, torch.Tensor):
            self._copy = value.detach().clone()
        elif isinstance(value, np.ndarray):
            self._copy = value.copy()
        elif isinstance(value, (list, dict, set, deque)):
            self._copy = copy.copy(value)
            items = value.values() if isinstance(value, dict) else value
            if depth < _DEEP and len(value) <= _MANY:
                self._parts = [Saved(item, depth + 1) for item in items if _can_change(item)]
        elif isinstance(value, Iterator):
            try:
                self._copy = copy.copy(value)
            except Exception:  # iterators of other libraries
                self._copy = None

    def changed(self) -> bool:
        """Whether the value itself has changed."""
        value, saved = self.value, self._copy
        state = _state_of(value)
        if state is not None:
            return not _equal(state[0](value), saved)
        if isinstance(value, torch.Tensor):
            return not _equal(value, saved)
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, saved, equal_nan=value.dtype.kind == "f")
        if isinstance(value, (list, dict, set, deque)):
            return not _same_items(value, saved) or any(part.changed() for part in self._parts)
        if isinstance(value, Iterator) and saved is not None:
            return _position(value) != _position(saved)
        return False

    def restore(self) -> Any:
        """Put the value back as it was and return it; of an iterator, a copy that is where it was."""
        value, saved = self.value, self._copy
        for part in self._parts:
            part.restore()
        if not self.changed():
            return value
        state = _state_of(value)
        if state is not None:
            state[1](value, saved)
        elif isinstance(value, torch.Tensor):
            with torch.no_grad():
                value.copy_(saved)
        elif isinstance(value, np.ndarray):
            value[...] = saved
        elif isinstance(value, (list, deque)):
            value.clear()
            value.extend(saved)
        elif isinstance(value, (dict, set)):
            value.clear()
            value.update(saved)
        elif isinstance(value, Iterator):
            return saved
        return value


class Restorable:
    """A variable with its value as it was."""

    def __init__(self, variable: Variable) -> None:
        self.variable = variable
        self._saved = Saved(variable.read())

    @property
    def name(self) -> str:
        """Name of the variable."""
        return self.variable.name

    @property
    def cannot_be_copied(self) -> bool:
        """Whether the value is a Python generator, which nothing can put back."""
        return isinstance(self._saved.value, GeneratorType)

    def changed(self) -> bool:
        """Whether the variable has another value, or its value has changed."""
        value = self.variable.read()
        if value is self._saved.value:
            return self._saved.changed()
        return not _equal(value, self._saved.value) or self._saved.changed()

    def restore(self) -> None:
        """Put back the value as it was."""
        if self.changed():
            self.variable.write(self._saved.restore())


def _state_of(value: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]] | None:
    return next((_STATES[kind] for kind in type(value).__mro__ if kind in _STATES), None)


def _can_change(value: Any) -> bool:
    return isinstance(value, (list, dict, set, deque, torch.Tensor, np.ndarray)) or _state_of(value) is not None


def _position(iterator: Any) -> Any:
    """Return what tells an iterator from one that has gone on."""
    try:
        return repr(iterator.__reduce__())
    except Exception:
        return repr(iterator)


def _equal(value: Any, other: Any) -> bool:
    if value is other:
        return True
    if isinstance(value, torch.Tensor) or isinstance(other, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and isinstance(other, torch.Tensor)
            and value.shape == other.shape
            and bool(torch.equal(value, other))
        )
    if isinstance(value, np.ndarray) or isinstance(other, np.ndarray):
        return type(value) is type(other) and np.array_equal(value, other)
    if isinstance(value, (list, tuple, dict, set, deque)) and isinstance(other, (list, tuple, dict, set, deque)):
        return _same_items(value, other)
    try:
        return bool(value == other)
    except Exception:  # objects that cannot be compared
        return False


def _same_items(value: Any, other: Any) -> bool:
    if len(value) != len(other):
        return False
    if isinstance(value, dict):
        return isinstance(other, dict) and [*value] == [*other] and all(_equal(value[key], other[key]) for key in value)
    if isinstance(value, set):
        return bool(value == other)
    return all(_equal(one, two) for one, two in zip(value, other, strict=True))


# Foreign code


class Changes:
    """What foreign code has changed since the beginning."""

    def __init__(self, target: Target, foreign: Sequence[Foreign]) -> None:
        known: dict[tuple[int, int], CodeReach] = {}
        self.saved: list[tuple[Foreign, list[Restorable]]] = []
        self._attributes: list[tuple[Foreign, str, dict[str, Any], set[str]]] = []
        self._deciding: set[int] = set()
        self._names: list[tuple[Foreign, set[str]]] = []
        self._modules = [(module.__dict__, set(module.__dict__)) for module in parts_of(target.model)]
        seen: dict[int, CodeReach] = {}
        for piece in foreign:
            reached = reached_by(target, piece, known)
            variables, holders = (reached.variables, reached.holders) if id(reached) not in seen else ([], [])
            seen[id(reached)] = reached
            if piece.module is not None:
                variables = [*variables, *_variables_of(piece.module)]
                holders = [*holders, ("", piece.module.__dict__)]
            self.saved.append((piece, [*map(Restorable, variables)]))
            self._attributes += [(piece, path, attributes, set(attributes)) for path, attributes in holders]
            self._names.append((piece, reached.names))
            if reached.decides:
                self._deciding.add(id(piece))
        self._random = _states_of_generators()

    def __call__(self) -> list[Foreign]:
        """Return the code that may decide by variables that have changed."""
        changed = {id(piece) for piece, variables in self.saved if any(one.changed() for one in variables)}
        changed |= {id(piece) for piece, *_ in self._new_attributes()}
        return [piece for piece, _ in self.saved if id(piece) in changed & self._deciding]

    def _new_attributes(self) -> Iterator[tuple[Foreign, str, dict[str, Any], str]]:
        """Attributes that a first pass has made, with the code that may have done so."""
        for piece, path, attributes, before in self._attributes:
            for name in attributes.keys() - before:
                yield piece, path, attributes, name
        for number, (attributes, before) in enumerate(self._modules):
            for name in attributes.keys() - before:
                yield from ((piece, f"{number}.", attributes, name) for piece, names in self._names if name in names)

    @property
    def draws(self) -> bool:
        """Whether random numbers of the process were used."""
        return _states_of_generators() != self._random

    def undo(self) -> set[tuple[str, str]]:
        """Put everything back; return code, by its description, with the names of the variables that had changed."""
        changed = {(piece.what, one.name) for piece, variables in self.saved for one in variables if one.changed()}
        for piece, path, attributes, name in [*self._new_attributes()]:
            changed.add((piece.what, path + name))
            attributes.pop(name, None)
        for _, variables in self.saved:
            for one in variables:
                one.restore()
        return changed


def _states_of_generators() -> tuple[Any, ...]:
    """States of the generators of random numbers that a process has: Python's, numpy's and torch's."""
    numpy = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], bytes(torch.get_rng_state().numpy())  # type: ignore[index]


def _variables_of(module: torch.nn.Module) -> Iterator[Variable]:
    """The attributes and buffers of a module with foreign code."""
    own = module.__dict__
    for name in own_attributes(module):
        yield Variable(name, functools.partial(own.get, name), functools.partial(own.__setitem__, name))
    for name, _ in module.named_buffers(recurse=False):
        yield Variable(name, functools.partial(getattr, module, name), functools.partial(setattr, module, name))


@contextlib.contextmanager
def undone(target: Target, foreign: Sequence[Foreign]) -> Iterator[Changes]:
    """Put back, after the block, what foreign code keeps and the state of random number generators."""
    devices = {parameter.device for parameter in target.model.parameters() if parameter.device.type == "cuda"}
    host, numbers = random.getstate(), np.random.get_state()
    changes = Changes(target, foreign)
    try:
        with torch.random.fork_rng(devices=devices):
            yield changes
    finally:
        volatile_in(target).update(changes.undo())
        random.setstate(host)
        np.random.set_state(numbers)
