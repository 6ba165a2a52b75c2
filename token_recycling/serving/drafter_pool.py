"""The drafters of a server: one shared by all requests, one per API key, or a new one for every request.

What a drafter learned from one text decides what it drafts for the next, and so how many tokens come at once: a matrix
shared by users is a side channel. `shared` has one drafter for all. `per-key` has one for each API key, begun as a copy
of the base. `per-request` has a copy of the base for every request, dropped afterwards. The base is what the matrix
file holds, or nothing; it never changes.

Any thread may acquire a drafter; it saves where nobody learns meanwhile: in the one thread that generates, or, of texts
that are generated together, a copy that was made between two steps. A copy costs a millisecond for two megabytes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..model.loading import Loaded, load_matrix
from ..recycling.matrix_file import fingerprint
from .settings import Isolation

logger = logging.getLogger("token_recycling.serving")


class DrafterPool:
    """Drafters in memory, by the names of API keys; the name is empty for the drafter that all share."""

    def __init__(
        self,
        loaded: Loaded,
        spec: str,
        isolation: Isolation,
        matrix: Path | None = None,
        max_keys: int = 64,
        on_save: Callable[[bool], None] = lambda good: None,
    ) -> None:
        """`on_save` is called with True for every matrix that was saved, and with False where that failed. Raises
        ValueError for a matrix file that cannot be used, or is given for a drafter without a matrix.
        """
        self.isolation, self._loaded, self._matrix = isolation, loaded, matrix
        self._max_keys, self._on_save = max_keys, on_save
        self.base = make_drafter(spec)
        self._unlearned = self.base.fork()
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._changed: set[str] = set()
        """Those in use, and others that have learned since they were saved."""
        self._used: Counter[str] = Counter()
        """How many requests have each; one more while it is saved."""
        self._lock, self._saving = threading.RLock(), threading.Lock()
        self._tokenizer = fingerprint(loaded.tokenizer)
        if matrix is not None:
            if isolation is Isolation.per_request and not matrix.exists():
                raise ValueError(
                    f"expected a matrix file to begin every request with, got none at {matrix}; learn one first, with "
                    "`token-recycling generate --matrix` or `serve --isolation shared`"
                )
            load_matrix(loaded, self.base, matrix)

    def __len__(self) -> int:
        """Number of drafters in memory."""
        return len(self._kept)

    @contextlib.contextmanager
    def acquire(self, name: str) -> Iterator[Drafter]:
        """The drafter for a request with the API key of that name, for the length of a `with` block."""
        if self.isolation is Isolation.per_request:
            yield self.base.fork()
            return
        name = "" if self.isolation is Isolation.shared else name
        with self._lock:
            if name not in self._kept:
                drafter, file = self.base.fork(), self.file(name)
                if name and file is not None:
                    load_matrix(self._loaded, drafter, file)
                self._kept[name] = drafter
            self._kept.move_to_end(name)
            self._used[name] += 1
            self._changed.add(name)
            drafter = self._kept[name]
        try:
            yield drafter
        finally:
            self._release(name)

    def anew(self) -> Drafter:
        """The same drafter with nothing learned, not even what the base has."""
        return self._unlearned.fork()

    def save(self, at_rest: Callable[[Callable[[], Any]], Future[Any]] | None = None) -> None:
        """Saves every matrix that changed since it was last saved, one after the other. Where others learn meanwhile,
        `at_rest` calls a function at a moment when they do not. A failure is logged, and tried again next time.
        """
        if self._matrix is None:
            return
        with self._saving:
            with self._lock:
                names = sorted(self._changed)
            for name in names:
                with self._lock:
                    if name not in self._changed:  # it had to make room, and was saved then
                        continue
                    self._used[name] += 1
                saved = False
                try:
                    copying = partial(self._copied, name)
                    saved = self._write(name, copying() if at_rest is None else at_rest(copying).result())
                finally:
                    if not saved:
                        self._changed.add(name)
                    self._release(name)

    def file(self, name: str) -> Path | None:
        """The matrix file of that key, in a folder beside the given file, which is that of the shared drafter."""
        if self._matrix is None:
            return None
        return self._matrix.with_name(f"{self._matrix.name}.keys") / name if name else self._matrix

    def _copied(self, name: str) -> Any:
        """A copy of a matrix from which nobody learns now. Without the lock, which others hold while they read files:
        one that comes is counted as in use before it counts as changed.
        """
        self._changed.discard(name)
        if self._used[name] > 1:
            self._changed.add(name)
        return copy.deepcopy(self._kept[name].matrix)

    def _write(self, name: str, matrix: Any) -> bool:
        """Writes the matrix of a key to its file; False, logged, where that fails."""
        file = self.file(name)
        try:
            matrix.save(file, self._tokenizer)
        except OSError as error:
            logger.error("the matrix could not be saved in %s: %s", file, error)
            self._on_save(False)
            return False
        self._on_save(True)
        return True

    def _release(self, name: str) -> None:
        """One fewer has it. Drops the least recently used; one that is in use, or cannot be saved, stays."""
        with self._lock:
            self._used[name] -= 1
            for other in [other for other in self._kept if not self._used[other]]:
                if len(self._kept) <= self._max_keys:
                    return
                changed = self._matrix is not None and other in self._changed
                if changed and not self._write(other, self._kept[other].matrix):
                    return
                self._changed.discard(other)
                del self._kept[other]
