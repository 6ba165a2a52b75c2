"""Costs that nobody measures, so that how much is drafted follows from the texts alone."""

from __future__ import annotations

import numpy as np

from .costs import Costs, OnlineCurve, Work, shared_by


class FixedCosts(Costs):
    """What steps cost by a curve that stays; no clock counts."""

    def __init__(self, times: np.ndarray, texts: int, length: int) -> None:
        """`times` (rows,) float64: of passes over 1, 2, ... rows in all, in any unit; no larger ones are made."""
        super().__init__(lambda sharing, _: OnlineCurve(shared_by(sharing, times)), texts, length)

    def in_passes(self, seconds: float) -> float:
        """None, whatever a clock has said."""
        return 0.0

    def count(self, work: Work, nodes: int, seconds: float) -> None:
        """Learn nothing: a drafter's work is what it is taken to be as long as nothing is known."""

    def took(self, nodes: int, seconds: float, length: int) -> None:
        """Learn nothing from a pass but how long the texts are."""
        self.share(self.texts, max(length, self.length))
