"""A lock that may stand in what is copied and pickled: the copy has a lock of its own, which is free."""

from __future__ import annotations

import threading


class Lock(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock: a copy, or what comes out of a pickle, is a new one that nobody holds."""

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


CAPTURING = Lock()
"""Held while operations are captured as a CUDA graph: a thread that waits for the whole device then ends the capture,
and another capture begins with waiting.
"""
