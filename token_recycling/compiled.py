"""Loops compiled by numba: once on a machine, then kept on its disk.

Most of the time of compiling is numba's own, in Python, for every function and every combination of types. So an
integer is made an int64 before it is passed on, whatever array it is from; there are no slices, no sorting and no
searching of numpy's; and a function that makes no arrays counts no references, which makes it faster too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import register_jitable


def compiled(function: Callable | None = None, *, allocates: bool = True, **options: Any) -> Any:
    """Has a function compiled when Python calls it first. `allocates`: whether it, or what it calls, makes arrays.
    Other options are numba's.
    """
    if function is None:
        return lambda function: compiled(function, allocates=allocates, **options)
    how = {"no_cfunc_wrapper": True, "_nrt": allocates, **options}
    return njit(cache=True, **how)(function)


def compiled_part(function: Callable | None = None, *, allocates: bool = False, **options: Any) -> Any:
    """Has a function compiled as a part of those that call it. From Python it is called as it stands."""
    if function is None:
        return lambda function: compiled_part(function, allocates=allocates, **options)
    return register_jitable(_nrt=allocates, **options)(function)
