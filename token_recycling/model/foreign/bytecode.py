"""Operations of code, read from its bytecode: names, stores, and its use of variables from outside."""

from __future__ import annotations

import dis
import functools
from dataclasses import dataclass
from types import CodeType

from .search import codes_within

_LOADING = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"})
_STORING = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_DEREF", "IMPORT_NAME"})


@dataclass(frozen=True)
class Operations:
    """Operations of code, functions within it included."""

    globals: frozenset[str]
    """Global variables and builtin functions."""
    attributes: frozenset[str]
    """Attribute names."""
    strings: frozenset[str]
    """String constants that could be attribute names."""
    stores: tuple[tuple[str, str], ...]
    """Operations that store outside local variables or import a module, each with the name."""
    set_on: frozenset[str]
    """Outside variables on which, or on attributes of which, the code sets attributes."""
    in_place: bool
    """Whether the code may write to a tensor in place."""


@functools.cache
def operations_in(code: CodeType) -> Operations:
    """Return the operations of code; cached."""
    variables, attributes, strings, set_on = set[str](), set[str](), set[str](), set[str]()
    stores: list[tuple[str, str]] = []
    in_place = False
    for each in codes_within(code):
        strings |= {constant for constant in each.co_consts if isinstance(constant, str) and constant.isidentifier()}
        in_place = in_place or any(name.endswith("_") and not name.startswith("_") for name in each.co_names)
        holder, sets = "", False
        for instruction in dis.get_instructions(each):
            operation, name = instruction.opname, str(instruction.argval)
            if operation in _LOADING:
                holder = name
                if sets:
                    set_on.add(name)
            elif operation == "STORE_ATTR":
                set_on.add(holder)
            elif not operation.startswith("LOAD_ATTR"):
                holder = ""
            sets = name == "setattr" if operation.startswith("LOAD_") else sets and operation == "PUSH_NULL"
            if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
                variables.add(name)
            elif operation in _STORING:
                stores.append((operation, name))
            elif name in each.co_names:
                attributes.add(name)
            writes = operation == "STORE_SUBSCR" or (operation == "BINARY_OP" and "=" in instruction.argrepr)
            in_place = in_place or writes
    return Operations(
        frozenset(variables),
        frozenset(attributes),
        frozenset(strings),
        tuple(stores),
        frozenset(set_on - {""}),
        in_place,
    )
