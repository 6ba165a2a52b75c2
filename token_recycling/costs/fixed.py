"""Fixed costs, for reproducible drafts: tree sizes depend on the sequence alone, never on a clock."""

from __future__ import annotations

import numpy as np

from .costs import Costs, OnlineCurve, Overhead, shared_by


class FixedCosts(Costs):
    """Costs of steps by a constant curve; no time is measured."""

    def __init__(self, times: np.ndarray, sequences: int, length: int) -> None:
        """`times` (rows,) float64: of forward passes over 1, 2, ... rows of the batch, in any unit."""
        super().__init__(lambda sharing, _: OnlineCurve(shared_by(sharing, times)), sequences, length)

    def in_passes(self, seconds: float) -> float:
        """Return 0: no time is measured."""
        return 0.0

    def count(self, overhead: Overhead, nodes: int, seconds: float) -> None:
        """Learn nothing: the overhead stays at its prior."""

    def took(self, nodes: int, seconds: float, length: int) -> None:
        """Learn only the length of the sequences."""
        self.share(self.sequences, max(length, self.length))
