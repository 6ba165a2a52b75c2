"""The drafters of a server: one shared by all requests, one per API key, or a new one for every request.

Acceptance depends on what a drafter has learned, so a matrix shared by users is a side channel. `shared` has one
drafter for all requests. `per-key` has one for each API key, forked from the base and lost at a restart. `per-request`
has a fork of the base for every request. The base is loaded from the matrix file or untrained, and never changes.

A request for steps may name a drafter that the operator offers (`--offer`); it starts untrained for every request.

Any thread may acquire a drafter. The shared matrix is copied between two steps, when no drafter learns, and the copy is
saved in another thread. Copying takes a millisecond per two megabytes.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ..drafters import _listing as listing
from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..model.loading import Loaded, load_matrix
from ..recycling.matrix_file import fingerprint
from .errors import ApiError, shown
from .settings import Isolation, Settings

logger = logging.getLogger("token_recycling.serving")


class DrafterPool:
    """The drafters of one model's requests."""

    def __init__(
        self,
        loaded: Loaded,
        settings: Settings,
        on_save: Callable[[bool], None] = lambda good: None,
    ) -> None:
        """`on_save` is called after every save of the matrix, with True on success and False on failure. Raises
        ValueError for an invalid drafter or an unusable matrix file.
        """
        self.isolation, self._matrix, self._on_save = settings.isolation, settings.matrix, on_save
        self.base = make_drafter(settings.drafter, reproducible=settings.reproducible)
        self._untrained = self.base.fork()
        self.offers = {offer: make_drafter(offer, reproducible=settings.reproducible) for offer in settings.offers}
        """Drafters that a request may name, by spec."""
        self._by_key: dict[str, Drafter] = {}
        """By name of the API key; the drafter that all requests share has the empty name."""
        self._changed = False
        """Whether the shared drafter may have learned since it was saved."""
        self._lock, self._saving = threading.Lock(), threading.Lock()
        self._tokenizer = fingerprint(loaded.tokenizer)
        if self._matrix is not None:
            if self.isolation is not Isolation.shared and not self._matrix.exists():
                raise ValueError(
                    f"there is no matrix file at {self._matrix}, which isolation {self.isolation.value} needs; "
                    "create one with `token-recycling generate --matrix` or `serve --isolation shared`"
                )
            load_matrix(loaded, self.base, self._matrix)

    def __len__(self) -> int:
        """Return the number of drafters kept for further requests."""
        return len(self._by_key)

    def acquire(self, key: str, isolated: bool = False) -> Drafter:
        """Return the drafter for a request with the API key named `key`; `isolated`: a new one that is not shared."""
        if isolated or self.isolation is Isolation.per_request:
            return self.base.fork()
        name = "" if self.isolation is Isolation.shared else key
        with self._lock:
            if name not in self._by_key:
                self._by_key[name] = self.base.fork()
            self._changed = True
            return self._by_key[name]

    def make(self, name: str) -> Drafter:
        """Return a new drafter: the server's own (`untrained`), none (`plain`), or an offered one. Raise ApiError
        for any other.
        """
        if name == "untrained":
            return self._untrained.fork()
        if name == "plain":
            return make_drafter("plain")
        self.check(name)
        return self.offers[name].fork()

    def check(self, name: str) -> None:
        """Raise ApiError for a drafter that a request may not name."""
        names = ("accelerated", "untrained", "plain", *self.offers)
        if name not in names:
            raise ApiError(
                400, f"drafter must be one of {', '.join(names)}, got {shown(name)}", "invalid_drafter", "drafter"
            )

    def described(self) -> list[dict[str, str]]:
        """Return the spec of each offered drafter and its summary."""
        return [
            {"spec": spec, "summary": listing.drafter(drafter.name, type(drafter))["summary"]}
            for spec, drafter in self.offers.items()
        ]

    def save(
        self, in_use: bool = False, between_steps: Callable[[Callable[[], Any]], Future[Any]] | None = None
    ) -> None:
        """Save the shared matrix if it may have changed since the last save. `in_use`: requests are running and may
        learn; `between_steps` calls a function between their steps. A failure is logged, and the next call retries.
        """
        if self._matrix is None or self.isolation is not Isolation.shared or not self._changed:
            return
        with self._saving:
            self._changed = in_use
            matrix = self._copied() if between_steps is None else between_steps(self._copied).result()
            try:
                matrix.save(self._matrix, self._tokenizer)
            except OSError as error:
                logger.error("the matrix could not be saved in %s: %s", self._matrix, error)
                self._changed = True
                self._on_save(False)
            else:
                self._on_save(True)

    def _copied(self) -> Any:
        shared: Any = self._by_key[""]
        return copy.deepcopy(shared.matrix)
