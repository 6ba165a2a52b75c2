"""Loops compiled by numba: once on a machine, then kept on its disk.

numba knows a compiled function again by the file that it stands in. What it calls from other files has gone into its
machine code, and its index names the classes of its arguments: after an upgrade in place the one would be out of date,
the other could not be read. So the sources of all loops are part of the name under which one is kept.

Most of the time of compiling is numba's own, in Python, for every function and every combination of types. So an
integer is made an int64 before it is passed on, whatever array it is from; there are no slices, no sorting and no
searching of numpy's; and a function that makes no arrays counts no references, which makes it faster too: learning is
four times as fast. That option (`_nrt`) is private, no public one says the same, and no other file names it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit
from numba.core import event
from numba.extending import register_jitable

logger = logging.getLogger("token_recycling")

_SECONDS = "10 to 70 s"
"""What drafters and engines take, by the speed of the processor."""
_PACKAGE = Path(__file__).parents[1]
_FOLDERS = ("recycling", "costs", "_util")
"""Where parts stand."""


def _digest() -> str:
    # Of this file too, since the options that numba is given are no part of its own names.
    digest = hashlib.sha256()
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
    try:
        return njit(cache=True, **how)(function)
    except RuntimeError:  # numba finds no folder to write to
        _Compiling.keeps = False
        return njit(**how)(function)


def compiled_part(function: Callable | None = None, *, allocates: bool = False, **options: Any) -> Any:
    """Has a function compiled as a part of those that call it. From Python it is called as it stands."""
    if function is None:
        return lambda function: compiled_part(function, allocates=allocates, **options)
    return register_jitable(_nrt=allocates, **options)(function)


class _Compiling(event.Listener, threading.local):
    """Logs that loops are being compiled, and counts the time of each thread."""

    keeps = True
    """Whether there is a folder to keep them in."""
    depth = 0
    """Compilations in progress, one within another; the outermost is of one of our functions."""
    since = 0.0
    seconds = 0.0
    """What this thread has spent compiling so far."""

    def on_start(self, event: event.Event) -> None:
        if not self.depth and not event.data["dispatcher"].py_func.__qualname__.endswith(_SOURCES):
            return
        self.depth += 1
        if self.depth == 1:
            self.since = time.perf_counter()
            _say(_Compiling.keeps)

    def on_end(self, event: event.Event) -> None:
        if self.depth:
            self.depth -= 1
            if not self.depth:
                self.seconds += time.perf_counter() - self.since


_said = False


def _say(keeps: bool) -> None:
    global _said
    if _said:
        return
    _said = True
    if keeps:
        logger.warning("compiling the drafting loops, once on this machine (%s)", _SECONDS)
    else:
        logger.warning(
            "compiling the drafting loops (%s), in every process anew, since no folder to keep them in can be "
            "written; set NUMBA_CACHE_DIR to one that can",
            _SECONDS,
        )


compiling = _Compiling()
event.register("numba:compile", compiling)
