"""Rows of tensors that wait to be learned from, and the newest of those that were: some are drawn from them again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from ..._util.locks import Lock

_BYTES = 16_000_000
"""Most bytes of the rows that are kept; half of that may wait."""

Rows = TypeVar("Rows", bound=tuple[torch.Tensor, ...])
"""A named tuple of tensors (n, ...)."""


def part(rows: Rows, which: slice | torch.Tensor) -> Rows:
    """Some of the rows."""
    return type(rows)._make(each[which] for each in rows)  # type: ignore[attr-defined]


def joined(parts: Sequence[Rows]) -> Rows:
    """All rows of the parts, in order."""
    return type(parts[0])._make(torch.cat(each) for each in zip(*parts, strict=True))  # type: ignore[attr-defined]


class Ring(Generic[Rows]):
    """The newest rows of all texts; several threads may add some."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of a row."""
        self.most = max(1, _BYTES // size)
        """How many are kept."""
        self.kept: Rows | None = None
        """None for none."""
        self._waiting: deque[Rows] = deque()
        self._count = 0
        """How many wait."""
        self._adding = Lock()

    def put(self, new: Rows) -> None:
        """Lets rows wait; those go that are too old to be learned from."""
        with self._adding:
            self._waiting.append(new)
            self._count += len(new[0])
            while len(self._waiting) > 1 and self._count > self.most // 2:
                self._count -= len(self._waiting.popleft()[0])

    def take(self, most: int) -> Rows | None:
        """The oldest ones that wait, `most` or a few more; None for none."""
        taken: list[Rows] = []
        with self._adding:
            left = self._count - most
            while self._waiting and self._count > left:
                taken.append(self._waiting.popleft())
                self._count -= len(taken[-1][0])
        return joined(taken) if taken else None

    def keep(self, taken: Sequence[Rows]) -> None:
        """Keeps what was taken, in place of the oldest. In one thread at a time."""
        kept = [] if self.kept is None else [self.kept]
        self.kept = part(joined([*kept, *taken]), slice(-self.most, None))
