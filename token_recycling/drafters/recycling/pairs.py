"""Pairs of states that wait to be learned from, and the newest of those that were: some are drawn from them again."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from ..._util.locks import Lock

_BYTES = 16_000_000
"""Most bytes of the pairs that are kept; half of that may wait."""


class StatePairs(NamedTuple):
    """Pairs of states, in half precision."""

    states: torch.Tensor  # (n, hidden) bfloat16: those before the tokens
    tokens: torch.Tensor  # (n,) int64
    following: torch.Tensor  # (n, hidden) bfloat16: those at the tokens

    def part(self, which: slice | torch.Tensor) -> StatePairs:
        return StatePairs._make(each[which] for each in self)


def joined(parts: list[StatePairs]) -> StatePairs:
    """All pairs of the parts, in order."""
    return StatePairs._make(torch.cat(each) for each in zip(*parts, strict=True))


class PairRing:
    """The newest pairs of all texts; several threads may add some."""

    def __init__(self, hidden: int) -> None:
        self.most = _BYTES // (4 * hidden + 8)
        """How many are kept."""
        self.kept: StatePairs | None = None
        """None for none."""
        self._waiting: deque[StatePairs] = deque()
        self._count = 0
        """How many wait."""
        self._adding = Lock()

    def add(self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor) -> None:
        """Lets pairs wait, of states (n, hidden) of any type; those go that are too old to be learned from."""
        new = StatePairs(states.to(torch.bfloat16), tokens, following.to(torch.bfloat16))
        with self._adding:
            self._waiting.append(new)
            self._count += len(tokens)
            while len(self._waiting) > 1 and self._count > self.most // 2:
                self._count -= len(self._waiting.popleft().tokens)

    def take(self, most: int) -> StatePairs | None:
        """The oldest ones that wait, `most` or a few more; None for none."""
        taken: list[StatePairs] = []
        with self._adding:
            left = self._count - most
            while self._waiting and self._count > left:
                taken.append(self._waiting.popleft())
                self._count -= len(taken[-1].tokens)
        return joined(taken) if taken else None

    def keep(self, taken: list[StatePairs]) -> None:
        """Keeps what was taken, in place of the oldest. In one thread at a time."""
        kept = [] if self.kept is None else [self.kept]
        self.kept = joined([*kept, *taken]).part(slice(-self.most, None))
