"""Ratios over prompts, and how far they may be from what other prompts and another day would give."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

PROCESSOR, WALL = "processor_seconds", "total_seconds"
_RESAMPLES = 2000
Row = dict[str, Any]


class Ratio(NamedTuple):
    """A ratio of sums over prompts, and the middle 95% of what it is over prompts drawn with replacement."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The sum of one figure of the prompts by that of another; both in the order of the prompts.

    Of a single prompt nothing is known of the noise: from none to infinite.
    """
    pairs = np.array([above, below])
    if pairs.shape[1] == 1:
        return Ratio(float(pairs[0, 0] / pairs[1, 0]), 0.0, float("inf"))
    drawn = np.random.default_rng(0).integers(pairs.shape[1], size=(_RESAMPLES, pairs.shape[1]))
    sums = pairs[:, drawn].sum(axis=-1)
    low, high = np.quantile(sums[0] / sums[1], (0.025, 0.975))
    return Ratio(float(pairs[0].sum() / pairs[1].sum()), float(low), float(high))


@dataclass
class Found:
    """The rows of one scenario, of the prompts that all methods finished, in one order for all methods."""

    rows: dict[str, list[Row]]
    """By method."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Found:
        by_method: dict[str, dict[str, Row]] = {}
        for row in rows:
            if row["failure"] is None:
                by_method.setdefault(row["method"], {})[row["prompt"]] = row
        methods = {row["method"] for row in rows}
        every = set.intersection(*(set(by_method.get(method, ())) for method in methods))
        return cls({method: [own[name] for name in own if name in every] for method, own in by_method.items()})

    @property
    def prompts(self) -> int:
        return len(next(iter(self.rows.values()), ()))

    def only(self, category: str) -> Found:
        """The prompts of one category."""
        return Found({name: [row for row in own if row["category"] == category] for name, own in self.rows.items()})

    def speed(self, method: str, other: str, clock: str = PROCESSOR) -> Ratio:
        """How many times as fast as the other a method is."""
        return ratio(self.times(other, clock), self.times(method, clock))

    def times(self, method: str, clock: str = PROCESSOR) -> list[float]:
        """Seconds of the whole calls, for as many tokens as the first method wrote: texts may part in 16 bits."""
        wanted = next(iter(self.rows.values()))
        return [
            statistics.median(row[clock]) * first["tokens"] / row["tokens"]
            for row, first in zip(self.rows[method], wanted, strict=True)
        ]

    def mat(self, method: str) -> float:
        own = self.rows[method]
        return sum(row["tokens"] for row in own) / sum(row["steps"] for row in own)

    def mat_over(self, method: str, other: str) -> Ratio:
        """A method's mean accepted tokens by the other's, in replay: all decode as many tokens."""
        return ratio(*([row["steps"] for row in self.rows[name]] for name in (other, method)))

    def first(self, method: str, place: int, clock: str = PROCESSOR) -> list[float]:
        """Seconds to the first token, place 0, or to the second."""
        return [row[clock][place] for row in self.rows[method]]

    def best(self, methods: Sequence[str]) -> str:
        """The fastest."""
        return min(methods, key=lambda method: sum(self.times(method)))
