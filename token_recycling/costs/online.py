"""t(n) learned while decoding: every step is a measurement of the pass that it made.

A Kalman filter over the logarithms of the times of all sizes as they are now. Two things change them. The machine's
load is common to all sizes and changes quickly. The shape, t(n) / t(1), hardly changes; what it is apart from the seed,
a curve that is expected, is a random walk along log n and a little of each size's own: so what is seen of one
size counts for its neighbours, less the farther they are, and sizes between two that were seen lie between them. Where
a step's size says too little about the shape, as with steps that are all alike, what it took is the load's. A single
step that took much longer or shorter counts as one that took 1.6 times as long, or as little. What the first steps took
is learned at once; later eight steps are learned from together.

A size is given the time that it may well have: what is expected, less the uncertainty against the sizes that are usual.
So a size that was never tried is tried where it may pay (optimism in the face of uncertainty), and as the uncertainty
of all sizes grows with every step, one that once seemed dear is tried again. No shape is forced on the curve but that a
larger pass takes as long as a smaller one or longer: it follows the stairs of kernels that work on 8 or 16 rows, and
experts of which more are read the more nodes there are.

Cost per step: 20 to 40 microseconds at first, a third of it later, and nothing where the curve is asked for.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from .._util.locks import Lock

TICK = 1e-7
"""Seconds; no pass is quicker than a clock can tell."""
_SHORTEST_BAND, _BAND_STEP = 256, 4
_LOAD_AT_FIRST, _LOAD = 1.0, 0.05
"""Deviations, in logarithms like all here: of the machine's load against the seed, and of its change from step to step.
"""
_SHAPE, _OWN = 0.15, 0.05
"""Of the shape against the seed, for every doubling of the nodes, and of each size by itself."""
_FADING = 4000
"""Steps in which as much uncertainty about the shape is added as there was at first."""
_NOISE, _MOST = 0.2, 0.5
"""Of what one step takes, and the most that it is taken to be off."""
_USUAL = 0.05
"""Share of the newest step among those that are usual."""
_ONE_BY_ONE, _TOGETHER = 32, 8
"""So many steps are learned from one by one, as many again two at a time, and so on; at most so many together."""


class OnlineCurve:
    """Times of passes over 1, 2, ... nodes of each text, as they go now. Several threads may tell what theirs took."""

    def __init__(self, seed: np.ndarray) -> None:
        """`seed` (nodes,) float64: seconds."""
        self._nodes = np.arange(1, len(seed) + 1)
        self._sizes = _sizes_up_to(len(seed))
        self._place = np.searchsorted(self._sizes, self._nodes).tolist()
        """Of each number of nodes, the size that stands for it."""
        octaves = np.log2(self._sizes)
        shape = _SHAPE**2 * np.minimum.outer(octaves, octaves) + _OWN**2 * np.eye(len(octaves))
        self._logs, self._covariance = np.log(seed[self._sizes - 1]), shape + _LOAD_AT_FIRST**2
        self._drift = shape / _FADING + _LOAD**2
        self._usual = np.zeros(len(octaves))
        """The share of each size among the newest steps."""
        self._learning = Lock()
        self._steps = 0
        """How many were learned from."""
        self._told: list[tuple[int, float]] = []
        """Sizes, and logarithms of seconds, of the steps since then."""
        self.seconds = seed
        """(nodes,) float64: what passes are expected to take, at best; never falling."""
        self.relative = seed / seed[0]
        """(nodes,) float64: t(n) / t(1)."""

    @property
    def steps(self) -> int:
        """How many were learned from."""
        return self._steps

    def shape(self) -> np.ndarray:
        """(nodes,) float64: t(n) / t(1) as it is most likely, without optimism; never falling."""
        return np.interp(self._nodes, self._sizes, np.maximum.accumulate(np.exp(self._logs - self._logs[0])))

    def took(self, nodes: int, seconds: float) -> None:
        """A pass over so many nodes of each text took so long; more than there are sizes for count as the largest."""
        with self._learning:
            self._told.append((self._place[min(nodes, len(self._place)) - 1], math.log(max(seconds, TICK))))
            if len(self._told) >= min(_TOGETHER, 1 + self._steps // _ONE_BY_ONE):
                self._learn()
                self.seconds = self._at_best()
                self.relative = self.seconds / self.seconds[0]

    def _learn(self) -> None:
        covariance, usual = self._covariance, self._usual
        covariance += len(self._told) * self._drift
        for place, log in self._told:
            off = log - self._logs[place]
            if self._steps:
                off = max(-_MOST, min(_MOST, off))
            else:
                usual[place] = 1
            deviation = math.sqrt(covariance[place, place] + _NOISE**2)
            row = covariance[place] / deviation
            self._logs += row * (off / deviation)
            covariance -= np.multiply.outer(row, row)
            usual *= 1 - _USUAL
            usual[place] += _USUAL
            self._steps += 1
        self._told = []

    def _at_best(self) -> np.ndarray:
        with_usual = self._covariance @ self._usual
        variance = np.diagonal(self._covariance) - 2 * with_usual + self._usual @ with_usual
        hoped = np.exp(self._logs - np.sqrt(np.maximum(variance, 0)))
        # Between the two curves that never fall, that above this one and that below.
        rising = (np.maximum.accumulate(hoped) + np.minimum.accumulate(hoped[::-1])[::-1]) / 2
        return np.interp(self._nodes, self._sizes, rising)


@lru_cache
def _sizes_up_to(most: int) -> np.ndarray:
    """The sizes that are kept: all up to 32, every second one up to 64, every fourth up to 128, ..."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, 2 ** (sizes[-1].bit_length() - 5))))
    return np.array(sizes)


def shared_by(texts: int, times: np.ndarray) -> np.ndarray:
    """(nodes,) float64: seconds of passes over 1, 2, ... nodes of each of `texts` texts, from `times` (rows,) of passes
    over 1, 2, ... rows in all; more rows than there are times for take as long as the most.
    """
    return times[min(texts, len(times)) - 1 :: texts]


def band(length: int) -> int:
    """The length that stands for texts of `length` tokens: 256, 1,024, 4,096, ..."""
    found = _SHORTEST_BAND
    while found < length:
        found *= _BAND_STEP
    return found
