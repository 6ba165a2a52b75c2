"""Functions compiled by numba: once per machine, then cached on disk.

numba identifies a cached function by its file alone. Functions called from other files are part of its machine code,
and its index names the classes of its arguments: after an in-place upgrade the former would be stale, and the latter
unreadable. So a hash of all sources is part of the name under which a function is cached.

Most of the compile time is spent in numba's own Python code, for every function and every combination of types. So
integers are converted to int64 before they are passed, whatever their array; there are no slices, and no numpy sorting
or searching. A function that creates no arrays counts no references, which also makes it faster: learning takes a
quarter of the time. That option (`_nrt`) is private: no public option is equivalent, and no other file uses it.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from numba import njit
from numba.core import config, event
from numba.extending import register_jitable

logger = logging.getLogger("token_recycling")

_SECONDS = "5 to 15 s"
"""Compile time of drafters and engines, by the speed of the processor."""
_PACKAGE = Path(__file__).parents[1]
_COMPILED = ("recycling/*.py", "costs.py", "_util/*.py")
"""Files with compiled functions."""


def _digest() -> str:
    # This file too: numba's own names do not include its options.
    digest = hashlib.sha256()
    for pattern in _COMPILED:
        for path in sorted(_PACKAGE.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


Record: TypeAlias = Any
"""A numpy record, whose fields compiled code reads and writes as attributes."""
_SOURCES = _digest()
_OPTIONS = {"no_cfunc_wrapper": True, "error_model": "numpy"}
"""Options of numba for all functions: nothing is compiled that no caller needs."""


def compiled(function: Callable | None = None, *, allocates: bool = True, **options: Any) -> Any:
    """Compile a function at its first call from Python. `allocates`: whether the function, or a function that it calls,
    creates arrays. Other options are numba's. Raises ImportError if numba does not compile.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]  # records have attributes in compiled code only
        raise ImportError("numba does not compile: unset NUMBA_DISABLE_JIT")
    if function is None:
        return lambda function: compiled(function, allocates=allocates, **options)
    function.__qualname__ += f"-{_SOURCES}"  # names the cached files
    how = {**_OPTIONS, "_nrt": allocates, **options}
    try:
        return njit(cache=True, **how)(function)
    except RuntimeError:  # numba finds no writable folder
        _Compiling.keeps = False
        return njit(**how)(function)


def compiled_part(function: Callable | None = None, *, allocates: bool = False, **options: Any) -> Any:
    """Compile a function as a part of its callers. When called from Python it runs uncompiled."""
    if function is None:
        return lambda function: compiled_part(function, allocates=allocates, **options)
    return register_jitable(**_OPTIONS, _nrt=allocates, **options)(function)


def compiled_inline(function: Callable) -> Any:
    """Compile a function within its only caller: for large functions, which LLVM would otherwise optimize again in
    every function that contains them. Not for small ones: inlining takes longer than compiling them.
    """
    how: dict[str, Any] = {**_OPTIONS, "_nrt": False, "inline": "always"}
    return njit(**how)(function)


class _Compiling(event.Listener, threading.local):
    """Logs that functions are being compiled, and sums the time per thread."""

    keeps = True
    """Whether there is a folder to cache the functions in."""
    collects = False
    """Whether garbage collection was enabled before compilation: numba creates so many objects that it takes a sixth of
    the time.
    """
    depth = 0
    """Number of nested compilations in progress; the outermost is of one of our functions."""
    since = 0.0
    seconds = 0.0
    """Seconds that this thread has spent compiling."""

    def on_start(self, event: event.Event) -> None:
        if not self.depth and not event.data["dispatcher"].py_func.__qualname__.endswith(_SOURCES):
            return
        self.depth += 1
        if self.depth == 1:
            self.since = time.perf_counter()
            self.collects = gc.isenabled()
            gc.disable()
            _say(_Compiling.keeps)

    def on_end(self, event: event.Event) -> None:
        if self.depth:
            self.depth -= 1
            if not self.depth:
                self.seconds += time.perf_counter() - self.since
                if self.collects:
                    gc.enable()


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
            "compiling the drafting loops (%s), in every process again: there is no writable folder to cache them in; "
            "set NUMBA_CACHE_DIR to one",
            _SECONDS,
        )


compiling = _Compiling()
event.register("numba:compile", compiling)
