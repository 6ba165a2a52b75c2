"""What a step of n nodes costs: t(n), the time of a forward pass over n nodes, as a curve.

A forward pass over n nodes takes longer than one over a single token, by how much depends on the model, its type of
numbers, the device, the number of threads and the length of the text. `budget` says how many nodes pay; what
measures it lies with the model (`model.pass_costs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

SHORTEST_BAND, _BAND_STEP = 256, 4
TICK = 1e-7
"""Seconds; no pass is quicker than a clock can tell."""


@dataclass(frozen=True)
class CostCurve:
    """Times of forward passes, the best of several."""

    length: int
    """Tokens of the text before the nodes."""
    sizes: tuple[int, ...]
    """Numbers of nodes, the root included, ascending from 1."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sizes or self.sizes[0] != 1 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"expected ascending sizes from 1, got {self.sizes}")
        if len(self.seconds) != len(self.sizes) or not all(0 < taken < math.inf for taken in self.seconds):
            raise ValueError(f"expected a time above 0 for each of {len(self.sizes)} sizes, got {self.seconds}")

    def relative(self) -> np.ndarray:
        """(nodes,) float64: t(n) / t(1) for n = 1, 2, ... nodes."""
        times = self.times()
        return times / times[0]

    def times(self) -> np.ndarray:
        """(nodes,) float64: seconds of passes over n = 1, 2, ... nodes.

        What lies between two sizes is on the line between them. A pass cannot cost more than a larger one: where it
        seems to, something else was going on.
        """
        nodes = np.arange(1, self.sizes[-1] + 1)
        return np.interp(nodes, self.sizes, np.minimum.accumulate(self.seconds[::-1])[::-1])

    def convex(self) -> CostCurve:
        """The largest convex curve below this one. Of a brief measurement it is the better estimate: other work on the
        machine only ever adds, to one size or another, and a size that seems dear hides all larger ones.
        """
        kept: list[int] = []
        for place in range(len(self.sizes)):
            while len(kept) > 1 and self._slope(kept[-2], kept[-1]) >= self._slope(kept[-1], place):
                kept.pop()
            kept.append(place)
        return CostCurve(
            self.length, tuple(self.sizes[place] for place in kept), tuple(self.seconds[place] for place in kept)
        )

    def _slope(self, before: int, after: int) -> float:
        return (self.seconds[after] - self.seconds[before]) / (self.sizes[after] - self.sizes[before])


def shared_by(texts: int, times: np.ndarray) -> np.ndarray:
    """(nodes,) float64: seconds of passes over 1, 2, ... nodes of each of `texts` texts, from `times` (rows,) of passes
    over 1, 2, ... rows in all; more rows than there are times for take as long as the most.
    """
    return times[min(texts, len(times)) - 1 :: texts]


def band(length: int) -> int:
    """The length that stands for texts of `length` tokens: 256, 1,024, 4,096, ..."""
    found = SHORTEST_BAND
    while found < length:
        found *= _BAND_STEP
    return found
