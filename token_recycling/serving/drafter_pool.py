"""The drafters of a server: one shared by all requests, one per API key, or a new one for every request.

What a drafter learned from one text decides what it drafts for the next, and so how many tokens come at once: a matrix
shared by users is a side channel. `shared` has one drafter for all. `per-key` has one for each API key, begun as a copy
of the base. `per-request` has a copy of the base for every request, dropped afterwards. The base is what the matrix
file holds, or nothing; it never changes.

A request for steps may name another drafter instead, made for that request with nothing learned. The operator lists
them (`--offer`), each with its options, as `recycling:tree=16`. Where the operator is the only user (`free_options`), a
request may change options too: numbers, switches and words of a fixed set, but no free text, which may name files and
models.

Any thread may acquire a drafter. A matrix is copied while nobody learns, between two steps or two sequences, and the
copy is saved in another thread. A copy costs a millisecond for two megabytes.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import threading
import typing
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from .._util.options import check_known, from_text, kinds_of, options_of, written_options
from ..drafters import _listing as listing
from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..model.loading import Loaded, load_matrix
from ..recycling.matrix_file import fingerprint
from .errors import ApiError
from .settings import Isolation

logger = logging.getLogger("token_recycling.serving")

MOST = 128
"""A number that a request may give an option of a drafter (nodes, tokens, candidates, megabytes), unless the operator
offers the drafter with more: time and memory of a step grow with it.
"""


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
        reproducible: bool = False,
    ) -> None:
        """`on_save` is called with True for every matrix that was saved, and with False where that failed. Raises
        ValueError for a matrix file that cannot be used, or is given for a drafter without a matrix.
        """
        self.isolation, self._loaded, self._matrix = isolation, loaded, matrix
        self._max_keys, self._on_save = max_keys, on_save
        self.base = make_drafter(spec, reproducible=reproducible)
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
                    f"there is no matrix file at {matrix}, with which every request would start; create one with "
                    "`token-recycling generate --matrix` or `serve --isolation shared`"
                )
            load_matrix(loaded, self.base, matrix)

    def __len__(self) -> int:
        """Number of drafters in memory."""
        return len(self._kept)

    @contextlib.contextmanager
    def acquire(self, name: str, isolated: bool = False) -> Iterator[Drafter]:
        """Give the drafter for a request with the API key of that name, for a `with` block; `isolated`: one
        that learns from no other request.
        """
        if isolated or self.isolation is Isolation.per_request:
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


class OfferedDrafters:
    """The drafters that requests may choose, by their specs."""

    def __init__(self, specs: Sequence[str], free_options: bool = False, reproducible: bool = False) -> None:
        """Raises ValueError for a drafter that cannot be made. `free_options`: requests may change options."""
        self._drafters = {spec: make_drafter(spec) for spec in specs}
        self._free_options, self._made = free_options, partial(make_drafter, reproducible=reproducible)
        for drafter in self._drafters.values():
            self._made(drafter)

    def make(self, chosen: str, local: bool = True) -> Drafter:
        """Make a new drafter as a request names it: as it is offered, or with other options, which needs a `local`
        request. Raises ApiError.
        """
        if chosen in self._drafters:
            return self._made(self._drafters[chosen].fork())
        spec = max((spec for spec in self._drafters if chosen.startswith(_prefix(spec))), key=len, default=None)
        if spec is None:
            names = ", ".join(("accelerated", "anew", "plain", *self._drafters))
            raise _refused(f"drafter must be one of {names}, got {chosen!r}")
        if not (self._free_options and local):
            raise _refused(f"drafter must be {spec!r}, got {chosen!r}: requests to this server cannot set options")
        base: Any = self._drafters[spec]
        try:
            written, kinds = written_options(spec, chosen.removeprefix(_prefix(spec))), settable(base)
            check_known(base.name, written, kinds)
            changed = {name: from_text(base.name, name, text, kinds[name]) for name, text in written.items()}
            _check_numbers(base, changed)
            return self._made(dataclasses.replace(base, **changed))
        except (ValueError, TypeError) as error:
            raise _refused(str(error)) from error

    def described(self, local: bool = True) -> list[dict[str, Any]]:
        """Return the spec of each drafter, its summary, and the options that a request may change, as plain values."""
        free = self._free_options and local
        return [{"spec": spec, **_described(drafter, free)} for spec, drafter in self._drafters.items()]


def _check_numbers(offered: Drafter, changed: Mapping[str, Any]) -> None:
    """Raises ValueError for a number above what a request may ask for, or that is none."""
    for name, value in changed.items():
        own = getattr(offered, name)
        most = max(MOST, own) if isinstance(own, (int, float)) else MOST
        if isinstance(value, (int, float)) and not value <= most:
            raise ValueError(f"{name} must be <= {most:,} in a request, got {value}")


def settable(drafter: Drafter) -> dict[str, Any]:
    """The options of a drafter that a request may change, by name, each with the type that its values then have: the
    words of a `Literal`, or a switch, or numbers.
    """
    hints, found = typing.get_type_hints(type(drafter)), {}
    for name in options_of(type(drafter)):
        kinds = kinds_of(hints[name])
        closed = [kind for kind in kinds if typing.get_origin(kind) is typing.Literal]
        closed += [kind for kind in (bool, int, float) if kind in kinds]
        if closed:
            found[name] = closed[0]
    return found


def _described(drafter: Drafter, free: bool) -> dict[str, Any]:
    listed, kinds, options = listing.drafter(drafter.name, type(drafter)), settable(drafter), []
    for option in listed["options"] if free else ():
        name = option["name"]
        if name in kinds:
            kind, default = kinds[name], str(getattr(drafter, name))
            words = ["true", "false"] if kind is bool else [str(word) for word in typing.get_args(kind)]
            about = {"name": name, "kind": "choice" if typing.get_args(kind) else kind.__name__}
            about |= {"choices": words or None, "default": default.lower() if kind is bool else default}
            options.append({**about, "summary": option["summary"]})
    return {"summary": listed["summary"], "options": options}


def _prefix(spec: str) -> str:
    """What a spec with further options begins with."""
    return f"{spec}," if ":" in spec else f"{spec}:"


def _refused(message: str) -> ApiError:
    return ApiError(400, message, "invalid_drafter", "drafter")
