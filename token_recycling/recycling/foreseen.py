"""What a source outside the matrix foresees of one draft: candidates after some places of its tree.

The places are entries, the root's first. Each is found by the entry before it and the token between them, so that they
stay what they are while the tree is grown anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled_part

ENTRIES = 64
"""Most places of a draft."""


Foresee = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Candidates (n, k) int64 and probabilities (n, k) float32 after new entries: parents (n,), tokens (n,)."""


class Foreseen(NamedTuple):
    """Candidates of up to m entries."""

    parents: np.ndarray  # (m,) int64: the entry before, -1 for the root's
    tokens: np.ndarray  # (m,) int64: the token at the place
    candidates: np.ndarray  # (m, k) int64: what may follow, the likeliest first
    shares: np.ndarray  # (m, k) float32: their probabilities
    filled: np.ndarray  # (1,) int64: how many entries there are

    @classmethod
    def empty(cls, k: int) -> Foreseen:
        ints = np.zeros(ENTRIES, np.int64)
        return cls(
            ints,
            ints.copy(),
            np.zeros((ENTRIES, k), np.int64),
            np.zeros((ENTRIES, k), np.float32),
            np.zeros(1, np.int64),
        )

    def add(self, parents: np.ndarray, tokens: np.ndarray, candidates: np.ndarray, shares: np.ndarray) -> None:
        """Appends n entries: (n,), (n,), (n, k), (n, k)."""
        begin = int(self.filled[0])
        new = slice(begin, begin + len(tokens))
        for held, added in zip(self[:-1], (parents, tokens, candidates, shares), strict=True):
            held[new] = added
        self.filled[0] = new.stop

    def wanted(self, entries: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The nodes of a tree (n,) that stand behind an entry and have none, as `add` takes them: the entries before
        (m,), the tokens (m,). As many as there is room for.
        """
        above = np.where(parents >= 0, entries[parents], -1)
        nodes = np.flatnonzero((entries < 0) & (above >= 0))[: ENTRIES - int(self.filled[0])]
        return above[nodes], tokens[nodes]


NOTHING_FORESEEN = Foreseen.empty(1)
"""No entries; never written."""


@compiled_part
def entry_below(foreseen: Foreseen, parent: int, token: int) -> int:
    """The entry of that token behind the entry `parent`, -1 where there is none."""
    if parent >= 0:
        for entry in range(parent + 1, foreseen.filled[0]):
            if foreseen.parents[entry] == parent and foreseen.tokens[entry] == token:
                return entry
    return -1
