"""A lock that may be part of copied and pickled objects: the copy has its own lock, which is free."""

from __future__ import annotations

import threading


class Lock(type(threading.RLock())):  # type: ignore[misc]
    """A reentrant lock whose copies, also by pickling, are new and free."""

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()


CAPTURING = Lock()
"""Held while operations are captured as a CUDA graph. A thread that synchronizes the whole device would abort the
capture, and a capture starts with such a synchronization.
"""
