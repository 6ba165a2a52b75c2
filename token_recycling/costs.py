"""The cost curve t(n), the time of verifying n nodes of each sequence, and the number of nodes worth verifying.

**The curve.** `OnlineCurve` learns t(n) from the time of every forward pass. It is a Kalman filter over the logarithms
of the times of all sizes. The load of the machine is common to all sizes and changes quickly. The shape t(n) / t(1)
hardly changes: it is a random walk along log n, plus a small deviation of each size, so that a measurement of one size
updates its neighbors. The estimate of a size is optimistic: its mean minus its uncertainty relative to the usual sizes.
So sizes that were never measured are tried where they may pay, and expensive sizes are probed again. The curve may have
any non-decreasing shape: it models the steps of kernels that process 8 or 16 rows, and mixtures of experts. With
`may_fall` it may also decrease, as for an engine whose kernel for two rows is slower than its kernel for five.

**The size.** A step emits one token, and every verified node adds its acceptance probability. Nodes are added in order
of probability as long as the expected tokens per time increase: the tree form of the threshold of SpecDec++
(2405.19715, theorem 3.1). The rule is applied by `may_pay` (trees grown node by node), `paying_prefix` (batches of
engines), `best_size` (passes of a draft model) and `loop.pacer.prune` (drafts of the loop).

All times except `OnlineCurve.seconds` are in units of t(1). Cost per step: 20 to 40 us at first, later a third of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ._util.compiled import compiled_part
from ._util.locks import Lock

TICK = 1e-7
"""Seconds; the clock cannot resolve shorter passes."""
_LOAD_AT_FIRST, _LOAD = 1.0, 0.05
"""Standard deviations of log time: of the load relative to the prior, and of its change per step."""
_SHAPE, _OWN = 0.15, 0.05
"""Standard deviations of the shape relative to the prior: per doubling of nodes, and of each size."""
_OWN_OF_FEW, _FEW, _CAUTION = 0.2, 8, 0.5
"""With `may_fall`: the deviation of each size up to 8 (less for larger sizes), and the fraction of the uncertainty that
is subtracted from an estimate.
"""
_FADING = 4000
"""Steps after which the uncertainty of the shape has grown by its initial amount."""
_NOISE, _MOST = 0.2, 0.5
"""Standard deviation of the log time of one step, and the bound that residuals are clipped to."""
_USUAL = 0.05
"""EMA rate of the tree-size histogram."""
_ONE_BY_ONE, _TOGETHER = 32, 8
"""The first 32 steps update the curve one at a time, the next 32 in pairs, and so on; at most 8 steps per update."""
NO_COSTS = np.empty(0)
"""Passed in place of t(n): every node pays."""


class OnlineCurve:
    """Current times of forward passes over 1, 2, ... nodes of each sequence. Thread-safe."""

    def __init__(self, seed: np.ndarray, may_fall: bool = False) -> None:
        """`seed` (nodes,) float64: prior in seconds. `may_fall`: a larger size may take less time than a smaller."""
        self._may_fall = may_fall
        self._nodes = np.arange(1, len(seed) + 1)
        self._sizes = _sizes_up_to(len(seed))
        self._place = np.searchsorted(self._sizes, self._nodes).tolist()
        """Index of the size that represents each number of nodes."""
        octaves = np.log2(self._sizes)
        own = _OWN_OF_FEW * np.minimum(1, _FEW / self._sizes) if may_fall else np.full(len(octaves), _OWN)
        shape = _SHAPE**2 * np.minimum.outer(octaves, octaves) + np.diag(own**2)
        self._logs, self._covariance = np.log(seed[self._sizes - 1]), shape + _LOAD_AT_FIRST**2
        self._drift = shape / _FADING + _LOAD**2
        self._usual = np.zeros(len(octaves))
        """Histogram of recent tree sizes."""
        self._learning = Lock()
        self.steps = 0
        """Number of steps learned from."""
        self._observed: list[tuple[int, float]] = []
        """Sizes and log seconds of the steps since the last update."""
        self.seconds = seed
        """(nodes,) float64: optimistic times in seconds; non-decreasing unless `may_fall`."""
        self.relative = seed / seed[0]
        """(nodes,) float64: t(n) / t(1)."""

    def shape(self) -> np.ndarray:
        """Return t(n) / t(1), (nodes,) float64, without optimism; non-decreasing."""
        with self._learning:
            return np.interp(self._nodes, self._sizes, np.maximum.accumulate(np.exp(self._logs - self._logs[0])))

    def record_time(self, nodes: int, seconds: float) -> None:
        """Learn from a forward pass over `nodes` nodes of each sequence; any size beyond the largest counts as that."""
        with self._learning:
            self._observed.append((self._place[min(nodes, len(self._place)) - 1], math.log(max(seconds, TICK))))
            if len(self._observed) >= min(_TOGETHER, 1 + self.steps // _ONE_BY_ONE):
                self._learn()
                self.seconds = self._at_best()
                self.relative = self.seconds / self.seconds[0]

    def _learn(self) -> None:
        covariance, usual = self._covariance, self._usual
        covariance += len(self._observed) * self._drift
        for place, log in self._observed:
            off = log - self._logs[place]
            if self.steps:
                off = max(-_MOST, min(_MOST, off))
            else:
                usual[place] = 1
            deviation = math.sqrt(covariance[place, place] + _NOISE**2)
            row = covariance[place] / deviation
            self._logs += row * (off / deviation)
            covariance -= np.multiply.outer(row, row)
            usual *= 1 - _USUAL
            usual[place] += _USUAL
            self.steps += 1
        self._observed = []

    def _at_best(self) -> np.ndarray:
        with_usual = self._covariance @ self._usual
        variance = np.diagonal(self._covariance) - 2 * with_usual + self._usual @ with_usual
        uncertainty = np.sqrt(np.maximum(variance, 0))
        if self._may_fall:
            return np.interp(self._nodes, self._sizes, np.exp(self._logs - _CAUTION * uncertainty))
        hoped = np.exp(self._logs - uncertainty)
        # The average of the tightest non-decreasing curves above and below the estimate.
        rising = (np.maximum.accumulate(hoped) + np.minimum.accumulate(hoped[::-1])[::-1]) / 2
        return np.interp(self._nodes, self._sizes, rising)


@lru_cache
def _sizes_up_to(most: int) -> np.ndarray:
    """Return the sizes of a curve: all up to 32, every second up to 64, every fourth up to 128, ..."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, 2 ** (sizes[-1].bit_length() - 5))))
    return np.array(sizes)


@compiled_part
def may_pay(costs: np.ndarray | Sequence[float], nodes: int, expected: float, rate: float, gain: float) -> bool:
    """Return whether more nodes, each gaining at most `gain`, may exceed `rate` tokens per time."""
    if not len(costs):
        return True
    for more in range(1, len(costs) - nodes + 1):  # noqa: SIM110 - compiled
        if expected + more * gain > rate * costs[nodes + more - 1]:
            return True
    return False


def least_gain(costs: np.ndarray, roots: int, expected: np.ndarray) -> float:
    """Return the gain above which one more node may increase the rate; infinite where no more nodes fit.

    `expected` (1 + n,): expected tokens of `roots` nodes alone, with the first added node, with two, and so on. `costs`
    as in `may_pay`, for a batch of `roots + n` nodes.
    """
    further = costs[roots + len(expected) - 1 :]
    if not len(further):
        return math.inf
    rate = (expected / costs[roots - 1 : roots - 1 + len(expected)]).max()
    return max(0.0, float(((rate * further - expected[-1]) / np.arange(1, len(further) + 1)).min()))


def paying_prefix(costs: np.ndarray, roots: int, expected: np.ndarray) -> int:
    """Return how many added nodes maximize the expected tokens per time, ties resolved to the largest; see
    `least_gain`.
    """
    costs = costs[roots - 1 : roots - 1 + len(expected)]
    rates = expected[: len(costs)] / costs
    return len(rates) - 1 - int(np.argmax(rates[::-1])) if len(rates) else 0


def best_size(probabilities: Sequence[float] | np.ndarray, times: np.ndarray) -> tuple[int, float]:
    """Return how many nodes to verify besides the root, and the resulting tokens per time.

    `probabilities` are those of the nodes, in any order; `times` (most + 1,) those of steps over 1, 2, ... nodes.
    """
    gains = np.append(1.0, np.sort(np.asarray(probabilities, dtype=np.float64))[::-1])[: len(times)]
    rates = gains.cumsum() / times[: len(gains)]
    nodes = int(np.argmax(rates))
    return nodes, float(rates[nodes])
