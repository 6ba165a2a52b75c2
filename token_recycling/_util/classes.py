"""Copy a class onto other bases, with `super()` bound to the copy."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import CellType, FunctionType
from typing import Any

_OF_ITS_BASES = frozenset({"__dict__", "__weakref__"})
"""Attributes that Python sets on a class according to its bases."""


def recreated_class(cls: type, bases: tuple[type, ...]) -> type:
    """Return a copy of a class with all its own attributes, derived from `bases`."""
    metaclass: Any = type(cls)
    own = CellType()
    copied = {name: _member_of(own, member, cls) for name, member in vars(cls).items() if name not in _OF_ITS_BASES}
    own.cell_contents = made = metaclass(cls.__name__, bases, copied)
    return made


def _member_of(own: CellType, member: Any, cls: type, outer: Sequence[CellType] = ()) -> Any:
    """Return a member of a class as a member of the class in the cell `own`, to which its `super()` then refers; so
    does that of functions that a decorator holds. `outer`: the enclosing cells, which the member may reference.
    """
    if type(member) in (classmethod, staticmethod):
        return type(member)(_member_of(own, member.__func__, cls, outer))
    if type(member) is property:
        getter, setter, deleter = (_member_of(own, one, cls, outer) for one in (member.fget, member.fset, member.fdel))
        return property(getter, setter, deleter, member.__doc__)
    if not isinstance(member, FunctionType):
        return member
    closure = member.__closure__ or ()
    cells = tuple(_cell_of(own, cell, cls, outer) for cell in closure)
    if all(map(operator.is_, cells, closure)):
        return member
    copied = FunctionType(member.__code__, member.__globals__, member.__name__, member.__defaults__, cells)
    copied.__kwdefaults__, copied.__qualname__ = member.__kwdefaults__, member.__qualname__
    copied.__dict__.update(member.__dict__)
    return copied


def _cell_of(own: CellType, cell: CellType, cls: type, outer: Sequence[CellType]) -> CellType:
    """Return a cell of a closure, converted for a member of the class in the cell `own`."""
    if any(cell is one for one in outer):
        return cell
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    if content is cls:
        return own
    copied = _member_of(own, content, cls, (*outer, cell))
    return cell if copied is content else CellType(copied)
