"""Loops compiled by numba: once on a machine, then kept on its disk.

numba knows a compiled function again by the file that it stands in. What it calls from other files has gone into its
machine code, and its index names the classes of its arguments: after an upgrade in place the one would be out of date,
the other could not be read. So the sources of all loops are part of the name under which one is kept.

Most of the time of compiling is numba's own, in Python, for every function and every combination of types. So an
integer is made an int64 before it is passed on, whatever array it is from; there are no slices, no sorting and no
searching of numpy's; and a function that makes no arrays counts no references, which makes it faster too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.extending import register_jitable

_PACKAGE = Path(__file__).parent
_FOLDERS = ("candidates", "costs")
"""Where parts stand. What is told numba here goes into the name too: numba looks at neither."""


def _digest() -> str:
    digest = hashlib.sha256((_PACKAGE / "compiled.py").read_bytes())
    for folder in _FOLDERS:
        for path in sorted((_PACKAGE / folder).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_SOURCES = _digest()


def compiled(function: Callable | None = None, *, allocates: bool = True, **options: Any) -> Any:
    """Has a function compiled when Python calls it first. `allocates`: whether it, or what it calls, makes arrays.
    Other options are numba's.
    """
    if function is None:
        return lambda function: compiled(function, allocates=allocates, **options)
    function.__qualname__ += f"-{_SOURCES}"  # names the files that numba keeps
    how = {"no_cfunc_wrapper": True, "_nrt": allocates, **options}
    return njit(cache=True, **how)(function)


def compiled_part(function: Callable | None = None, *, allocates: bool = False, **options: Any) -> Any:
    """Has a function compiled as a part of those that call it. From Python it is called as it stands."""
    if function is None:
        return lambda function: compiled_part(function, allocates=allocates, **options)
    return register_jitable(_nrt=allocates, **options)(function)
