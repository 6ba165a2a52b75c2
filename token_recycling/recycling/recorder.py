"""How texts that are being written come to the past of all, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .occurrences import BREAK, LONGEST, Occurrences, masked

_PIECE, _LEAD = 32, 8
"""Tokens of a piece of a text, and how many of the piece before it stand before these again."""


class Recorder:
    """Adds one text to the past of all, a piece at a time: texts that are written at once do not mix. A piece begins
    with the end of the one before, unless that is the newest of the past. One that is there already is not added again.
    """

    def __init__(self, past: Occurrences, before: np.ndarray | None = None, piece: int = _PIECE) -> None:
        """`before` (n,): tokens before the text, matched and never drafted. `piece`: tokens that are added at once."""
        self._past, self._piece, self._written_to = past, piece, -1
        self._held: list[int] = [] if before is None else masked(before[-LONGEST:]).tolist()
        """The end of the last piece, or of `before`, and the tokens since."""
        self._lead = len(self._held)

    def add(self, tokens: Iterable[int], ends: bool = False) -> None:
        """Add what was written since the last call; `ends`: the text ends with it."""
        self._held.extend(tokens)
        if len(self._held) - self._lead < (1 if ends else self._piece):
            return
        with self._past.writing:
            if self._past.holds(self._held):
                self._written_to = -1  # the next piece does not follow what stands at the end
            else:
                alone = len(self._past) == self._written_to
                self._past.extend(self._held[self._lead :] if alone else [BREAK, *self._held])
                self._written_to = len(self._past)
        self._held = self._held[-_LEAD:]
        self._lead = len(self._held)
