"""Costs: t(n), the time of verifying n nodes of each sequence, and the drafting overhead, learned while decoding.

`OnlineCurve` learns t(n) from the time of every forward pass. It is a Kalman filter over the logarithms of the times of
all sizes. The load of the machine is common to all sizes and changes quickly. The shape t(n) / t(1) hardly changes: it
is a random walk along log n, plus a small deviation of each size, so that a measurement of one size updates its
neighbours. The estimate of a size is optimistic: its mean less its uncertainty relative to the usual sizes. So sizes
that were never measured are tried where they may pay, and expensive ones are probed again. The curve may take any shape
that never falls: it follows the steps of kernels that work on 8 or 16 rows, and of mixtures of experts. Where
`may_fall` says so it may fall too, as in an engine whose kernel for two rows is slower than that for five.

`Overhead` learns the time of a drafter itself, per step and per node, and the tokens that its drafts gave.

`Costs` belongs to the sequences that share forward passes, and is what drafters query. Drafting is disabled where
drafted steps give fewer tokens per time than plain decoding in the long run. Estimates of accepted tokens are scaled by
the forecast ratio, accepted / predicted tokens of past drafts, since they are too high at the start of a sequence.

All but the seconds of a curve is in units of t(1). Cost per step: 20 to 40 microseconds at first, later a third of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np

from .._util.locks import Lock

TICK = 1e-7
"""Seconds; no pass is quicker than a clock can tell."""
_SHORTEST_BAND, _BAND_STEP = 256, 4
_LOAD_AT_FIRST, _LOAD = 1.0, 0.05
"""Standard deviations of log time: of the load relative to the seed, and of its change per step."""
_SHAPE, _OWN = 0.15, 0.05
"""Standard deviations of the shape relative to the seed: per doubling of nodes, and of each size."""
_OWN_OF_FEW, _FEW, _CAUTION = 0.2, 8, 0.5
"""Where times may fall: the deviation of each size up to 8, less for larger ones; and the share of the uncertainty by
which estimates are optimistic.
"""
_FADING = 4000
"""Steps after which the uncertainty of the shape has grown by its initial amount."""
_NOISE, _MOST = 0.2, 0.5
"""Standard deviation of the log time of one step, and the largest residual that is counted."""
_USUAL = 0.05
"""EMA rate of the tree-size histogram."""
_ONE_BY_ONE, _TOGETHER = 32, 8
"""The first 32 steps update the curve one by one, the next 32 two at a time, and so on; at most 8 together."""
_KEPT = 0.999
"""Exponential decay per step."""
_STEPS, _RATE = 16.0, 1.25
"""Prior of the tokens per time of a call: number of steps, and tokens of each."""
_PREDICTED, _ACCEPTED = 8.0, 0.7
"""Prior of the forecast ratio: predicted tokens, and the share that was accepted."""
_OVERHEAD, _STEPS_KNOWN = 0.02, 4.0
"""Prior of the overhead of a step, and the number of steps that it counts for."""
_OUTLIER = 3.0
"""Largest measured overhead that is counted, as a multiple of the estimate: outliers are other processes."""
_OF_CALL = 0.98
"""Exponential decay per step of the sums that decide whether drafting pays in a call."""
_FORGOTTEN = 0.2
"""Predicted and accepted tokens of a step without a draft: the forecast ratio slowly returns to 1."""
_LOOKS, _LONGEST = 0.01, 64
"""Share of the time that probing takes where drafting is disabled, and the most steps between two probes."""


class OnlineCurve:
    """Current times of forward passes over 1, 2, ... nodes of each sequence; thread-safe."""

    def __init__(self, seed: np.ndarray, may_fall: bool = False) -> None:
        """`seed` (nodes,) float64: seconds. `may_fall`: a larger size may take less time than a smaller one."""
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
        """(nodes,) float64: optimistic times in seconds; never falling unless they may."""
        self.relative = seed / seed[0]
        """(nodes,) float64: t(n) / t(1)."""

    def shape(self) -> np.ndarray:
        """Return t(n) / t(1), (nodes,) float64, without optimism; never falling."""
        with self._learning:
            return np.interp(self._nodes, self._sizes, np.maximum.accumulate(np.exp(self._logs - self._logs[0])))

    def took(self, nodes: int, seconds: float) -> None:
        """Learn from a forward pass over `nodes` of each sequence; larger ones than the largest size count as that."""
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
        # Between the two curves that never fall, that above this one and that below.
        rising = (np.maximum.accumulate(hoped) + np.minimum.accumulate(hoped[::-1])[::-1]) / 2
        return np.interp(self._nodes, self._sizes, rising)


@lru_cache
def _sizes_up_to(most: int) -> np.ndarray:
    """Return the sizes of a curve: all up to 32, every second one up to 64, every fourth up to 128, ..."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + max(1, 2 ** (sizes[-1].bit_length() - 5))))
    return np.array(sizes)


def shared_by(sequences: int, times: np.ndarray) -> np.ndarray:
    """Return seconds by nodes of each sequence, (nodes,) float64, from `times` (rows,) by rows of the whole batch."""
    return times[min(sequences, len(times)) - 1 :: sequences]


def band(length: int) -> int:
    """Return the length bucket of sequences of `length` tokens: 256, 1,024, 4,096, ..."""
    found = _SHORTEST_BAND
    while found < length:
        found *= _BAND_STEP
    return found


class Overhead:
    """Drafting overhead and yield of a drafter, over all its sequences, with exponential decay; thread-safe."""

    def __init__(self, step: float = _OVERHEAD, rate: float = _RATE, nodes: int = 1) -> None:
        """Priors: `step`, the overhead of a step, and `rate`, the tokens of a step of `nodes` nodes."""
        self.step, self.node = step, 0.0
        """Overhead per step and per drafted node."""
        self._sums = [_STEPS_KNOWN, 0.0, 0.0, step * _STEPS_KNOWN, 0.0]
        """Sums of steps, nodes, squared nodes, time, and time x nodes, for a linear regression."""
        self._steps = [0.0, 0.0, _ACCEPTED * _PREDICTED, _PREDICTED]
        """Sums of tokens, time, accepted drafted tokens, and predicted ones."""
        self.nodes, self._rate, self._unknown = nodes, rate, _STEPS
        """Nodes and tokens of the prior steps, and how many of them still count."""
        self._counting = Lock()

    def of(self, nodes: int) -> float:
        """Return the overhead of a step of `nodes` nodes, the root included."""
        return self.step + self.node * (nodes - 1)

    def count(self, nodes: int, time: float) -> None:
        """Learn from the time that drafting `nodes` nodes, the root included, and learning from them took."""
        with self._counting:
            drafted = nodes - 1
            # Negative where another thread has compiled meanwhile.
            time = max(0.0, min(time, _OUTLIER * self.of(nodes)))
            seen = (1, drafted, drafted**2, time, drafted * time)
            self._sums = [_KEPT * old + new for old, new in zip(self._sums, seen, strict=True)]
            steps, nodes_, squares, total, products = self._sums
            spread = squares - nodes_ * nodes_ / steps
            slope = (products - nodes_ * total / steps) / spread if spread > 1 else 0.0
            self.node = min(max(0.0, slope), total / max(1.0, nodes_))
            self.step = (total - self.node * nodes_) / steps

    def gave(self, *step: float) -> None:
        """Count a step: its tokens, time, accepted drafted tokens, and predicted ones."""
        with self._counting:
            self._steps = [_KEPT * old + new for old, new in zip(self._steps, step, strict=True)]
            self._unknown *= _KEPT

    def starting_sums(self, passes: float) -> list[float]:
        """Return the four sums that a new call starts with, in proportion to past steps; `passes` is t(`nodes`)."""
        tokens, time, accepted, predicted = self._steps
        tokens, time = tokens + self._unknown * self._rate, time + self._unknown * passes
        return [_STEPS * tokens / time, _STEPS, _PREDICTED * accepted / predicted, _PREDICTED]


class Costs:
    """Costs of the steps of sequences that share forward passes and may join and leave; in units of t(1)."""

    def __init__(
        self,
        curve_of: Callable[[int, int], OnlineCurve],
        sequences: int,
        length: int,
        agreed: Callable[[float], float] = float,
    ) -> None:
        """`curve_of(sequences, length)` returns a curve; `agreed` makes times equal in all processes of a model."""
        self.sequences, self.length = sequences, length
        self.nodes = 1
        """Nodes of the largest tree of the newest pass."""
        self.seconds = 0.0
        """Seconds of the newest pass."""
        self._curve_of, self._agreed = curve_of, agreed
        self._curve: OnlineCurve | None = None
        """None until a drafter queries costs."""
        self._steps: WeakKeyDictionary[Overhead, list[float]] = WeakKeyDictionary()
        """Sums of `Overhead.starting_sums` for this call, by drafter."""

    @property
    def asked(self) -> bool:
        """Whether a drafter has queried costs."""
        return self._curve is not None

    @property
    def by_nodes(self) -> np.ndarray:
        """(nodes,) float64: t(n) / t(1) of verifying n = 1, 2, ... nodes of every sequence, as learned so far."""
        return self._now.relative

    def of(self, nodes: int) -> float:
        """Return the cost of verifying `nodes` nodes of every sequence, at most the largest known."""
        return float(self.by_nodes[min(nodes, len(self.by_nodes)) - 1])

    def in_passes(self, seconds: float) -> float:
        """Convert seconds of overhead for one sequence; the sequences of a batch are drafted for one after another."""
        return self._agreed(seconds * self.sequences / float(self._now.seconds[0]))

    def count(self, overhead: Overhead, nodes: int, seconds: float) -> None:
        """Learn the drafting overhead of a step of `nodes` nodes of one sequence, the root included."""
        overhead.count(nodes, self.in_passes(seconds))

    @property
    def _now(self) -> OnlineCurve:
        if self._curve is None:
            self._curve = self._curve_of(self.sequences, self.length)
        return self._curve

    def share(self, sequences: int, length: int) -> None:
        """Set how many sequences share the next passes, the longest of `length` tokens."""
        if self._curve is not None and (sequences, band(length)) != (self.sequences, band(self.length)):
            self._curve = self._curve_of(sequences, length)
        self.sequences, self.length = sequences, length

    def took(self, nodes: int, seconds: float, length: int) -> None:
        """Learn from a pass over `nodes` nodes of each sequence, the longest of `length` tokens by now."""
        self.seconds = seconds
        if self._curve is not None:
            self.share(self.sequences, max(length, self.length))
            self._curve.took(nodes, self._agreed(seconds))

    def _sums_of(self, overhead: Overhead) -> list[float]:
        """Return the sums of this call for a drafter."""
        if overhead not in self._steps:
            self._steps[overhead] = overhead.starting_sums(self.of(overhead.nodes))
        return self._steps[overhead]

    def forecast_ratio(self, overhead: Overhead) -> float:
        """Return the forecast ratio, accepted / predicted tokens, at most 1."""
        _, _, accepted, predicted = self._sums_of(overhead)
        return min(1.0, accepted / predicted)

    def back_off(self, overhead: Overhead, tokens: int, passes: float, own: float, predicted: float = 1.0) -> int:
        """Count a drafted step; return for how many steps drafting is disabled.

        The step gave `tokens` and took `passes`, `own` of them for drafting. Drafting is disabled where it does not pay
        in the long run, unless this step was to pay by its `predicted` tokens. The long run is that of all sequences
        of the batch: disabling drafting for one of them saves nothing.
        """
        paid = 1 + self.forecast_ratio(overhead) * (predicted - 1) >= passes
        seen = (tokens - 1, predicted - 1) if predicted > 1 else (_FORGOTTEN, _FORGOTTEN)
        step = tokens, passes, *seen
        sums = self._steps[overhead]
        sums[:] = (_OF_CALL * old + new for old, new in zip(sums, step, strict=True))
        overhead.gave(*step)
        return 0 if paid or sums[0] >= sums[1] else min(int(own / _LOOKS), _LONGEST)
