"""What steps take: t(n), the cost of a pass over n nodes of each text, and a drafter's own work beside it.

Three objects, from the smallest to the one that whoever decides a size asks (`Costs`):

`OnlineCurve` learns t(n) while decoding; every step is a measurement of the pass that it made. It is a Kalman filter
over the logarithms of the times of all sizes. The load of the machine is common to all of them and changes quickly; the
shape, t(n) / t(1), hardly changes: apart from the seed it is a random walk along log n and a little of each size's own,
so that what is seen of one size counts for its neighbours. A size is given the time that it may well have, what is
expected less the uncertainty against the usual sizes: so a size that was never tried is tried where it may pay
(optimism in the face of uncertainty), and one that once seemed dear is tried again. The curve may take any shape that
never falls: it follows the stairs of kernels that work on 8 or 16 rows, and experts, of which more nodes read more.

`Work` learns what a drafter itself takes, so much a step and so much a node, and what its drafts have brought.

`Costs` is of the texts that share passes now. Whether to draft at all is decided by the long run: by the tokens per
time of past drafted steps, all they took included, against plain decoding. How far forecasts are believed is decided
by what came of past ones: of a new text they promise too much.

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
"""Deviations in logarithms: of the machine's load against the seed, and of its change from step to step."""
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
_KEPT = 0.999
"""What older steps keep with every new one."""
_STEPS, _RATE = 16.0, 1.25
"""Steps that a text begins with, and the tokens of each as long as nothing is known."""
_FORESEEN, _CAME = 8.0, 0.7
"""Foreseen tokens that a text begins with, and the share that has come as long as nothing is known."""
_WORK, _WORKED = 0.02, 4.0
"""A drafter's work in a step as long as nothing is known, and the steps that this counts for."""
_OUTLIER = 3.0
"""Work counts as at most so many times what is expected: the machine may do something else meanwhile."""
_OF_CALL = 0.98
"""What older steps of a call count for, with every new one, where it is decided whether drafting pays."""
_FORGOTTEN = 0.2
"""Tokens, foreseen and come, that a step without a draft counts as, so that forecasts are believed again in time."""
_LOOKS, _LONGEST = 0.01, 64
"""Share of the time that trying again takes where drafting does not pay, and the most steps between two tries."""


class OnlineCurve:
    """Times of passes over 1, 2, ... nodes of each text, as they go now; used by several threads."""

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
        self.steps = 0
        """How many were learned from."""
        self._told: list[tuple[int, float]] = []
        """Sizes, and logarithms of seconds, of the steps since then."""
        self.seconds = seed
        """(nodes,) float64: what passes are expected to take, at best; never falling."""
        self.relative = seed / seed[0]
        """(nodes,) float64: t(n) / t(1)."""

    def shape(self) -> np.ndarray:
        """(nodes,) float64: t(n) / t(1) as it is most likely, without optimism; never falling."""
        with self._learning:
            return np.interp(self._nodes, self._sizes, np.maximum.accumulate(np.exp(self._logs - self._logs[0])))

    def took(self, nodes: int, seconds: float) -> None:
        """Learn from a pass over `nodes` of each text; more than there are sizes for count as the largest."""
        with self._learning:
            self._told.append((self._place[min(nodes, len(self._place)) - 1], math.log(max(seconds, TICK))))
            if len(self._told) >= min(_TOGETHER, 1 + self.steps // _ONE_BY_ONE):
                self._learn()
                self.seconds = self._at_best()
                self.relative = self.seconds / self.seconds[0]

    def _learn(self) -> None:
        covariance, usual = self._covariance, self._usual
        covariance += len(self._told) * self._drift
        for place, log in self._told:
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
    """(nodes,) float64: seconds of passes over nodes of each text, from `times` (rows,) of passes over rows in all."""
    return times[min(texts, len(times)) - 1 :: texts]


def band(length: int) -> int:
    """The length that stands for texts of `length` tokens: 256, 1,024, 4,096, ..."""
    found = _SHORTEST_BAND
    while found < length:
        found *= _BAND_STEP
    return found


class Work:
    """A drafter's own work in a step and what its drafts brought, of all its texts; older steps fade."""

    def __init__(self, step: float = _WORK, rate: float = _RATE, nodes: int = 1) -> None:
        """As long as nothing is known: `step`, the work of a step, and `rate`, its tokens for a pass over `nodes`."""
        self.step, self.node = step, 0.0
        """For every step that is drafted and learned from; and for every drafted node."""
        self._sums = [_WORKED, 0.0, 0.0, step * _WORKED, 0.0]
        """Of steps, nodes, squared nodes, time, and time by nodes."""
        self._steps = [0.0, 0.0, _CAME * _FORESEEN, _FORESEEN]
        """Tokens, time, drafted tokens that came, drafted tokens that were foreseen."""
        self.nodes, self._rate, self._unknown = nodes, rate, _STEPS
        """Nodes and tokens of the steps that are taken to have been made at first, and how many of them still count."""
        self._counting = Lock()

    def of(self, nodes: int) -> float:
        """The work of a step of `nodes` nodes, the root included."""
        return self.step + self.node * (nodes - 1)

    def count(self, nodes: int, time: float) -> None:
        """Learn how long drafting `nodes` nodes, the root included, and learning from them took."""
        with self._counting:
            drafted = nodes - 1
            # Below 0 where another thread has compiled meanwhile.
            time = max(0.0, min(time, _OUTLIER * self.of(nodes)))
            seen = (1, drafted, drafted**2, time, drafted * time)
            self._sums = [_KEPT * old + new for old, new in zip(self._sums, seen, strict=True)]
            steps, nodes_, squares, total, products = self._sums
            spread = squares - nodes_ * nodes_ / steps
            slope = (products - nodes_ * total / steps) / spread if spread > 1 else 0.0
            self.node = min(max(0.0, slope), total / max(1.0, nodes_))
            self.step = (total - self.node * nodes_) / steps

    def gave(self, *step: float) -> None:
        """Count a step: its tokens, its time, its drafted tokens that came, and those that were foreseen."""
        with self._counting:
            self._steps = [_KEPT * old + new for old, new in zip(self._steps, step, strict=True)]
            self._unknown *= _KEPT

    def begun(self, passes: float) -> list[float]:
        """The four sums for a new call, as if it had made steps like all before it; `passes`: for one over `nodes`."""
        tokens, time, came, foreseen = self._steps
        tokens, time = tokens + self._unknown * self._rate, time + self._unknown * passes
        return [_STEPS * tokens / time, _STEPS, _FORESEEN * came / foreseen, _FORESEEN]


class Costs:
    """What the steps of some texts cost, which share passes and may come and go; in units of t(1)."""

    def __init__(
        self,
        curve_of: Callable[[int, int], OnlineCurve],
        texts: int,
        length: int,
        agreed: Callable[[float], float] = float,
    ) -> None:
        """`curve_of(texts, length)` gives a curve; `agreed` makes a time that of all processes that share the model."""
        self.texts, self.length = texts, length
        self.nodes = 1
        """Nodes of the largest tree of the newest pass."""
        self.seconds = 0.0
        """What the newest pass took."""
        self._curve_of, self._agreed = curve_of, agreed
        self._curve: OnlineCurve | None = None
        """None as long as nobody has asked what passes cost."""
        self._steps: WeakKeyDictionary[Work, list[float]] = WeakKeyDictionary()
        """The sums of `Work.begun` for this call, by what drafted."""

    @property
    def asked(self) -> bool:
        """Whether a drafter has asked what passes cost."""
        return self._curve is not None

    @property
    def by_nodes(self) -> np.ndarray:
        """(nodes,) float64: t(n) / t(1) of verifying n = 1, 2, ... nodes of every text, as learned so far."""
        return self._now.relative

    def of(self, nodes: int) -> float:
        """The cost of verifying `nodes` nodes of every text; more than there are costs for count as the most."""
        return float(self.by_nodes[min(nodes, len(self.by_nodes)) - 1])

    def in_passes(self, seconds: float) -> float:
        """Convert seconds of work for one text. The texts of a batch are drafted for one after another."""
        return self._agreed(seconds * self.texts / float(self._now.seconds[0]))

    def count(self, work: Work, nodes: int, seconds: float) -> None:
        """Learn how long a drafter worked on a step of `nodes` nodes of one text, the root included."""
        work.count(nodes, self.in_passes(seconds))

    @property
    def _now(self) -> OnlineCurve:
        if self._curve is None:
            self._curve = self._curve_of(self.texts, self.length)
        return self._curve

    def share(self, texts: int, length: int) -> None:
        """Set how many texts share the next passes, the longest of `length` tokens."""
        if self._curve is not None and (texts, band(length)) != (self.texts, band(self.length)):
            self._curve = self._curve_of(texts, length)
        self.texts, self.length = texts, length

    def took(self, nodes: int, seconds: float, length: int) -> None:
        """Learn from a pass over `nodes` nodes of each text, the longest of `length` tokens by now."""
        self.seconds = seconds
        if self._curve is not None:
            self.share(self.texts, max(length, self.length))
            self._curve.took(nodes, self._agreed(seconds))

    def _begun(self, work: Work) -> list[float]:
        """The sums of this call for what drafts."""
        if work not in self._steps:
            self._steps[work] = work.begun(self.of(work.nodes))
        return self._steps[work]

    def trust(self, work: Work) -> float:
        """The share of the tokens foreseen that has come, 1 at most: forecasts are corrected by it."""
        _, _, came, foreseen = self._begun(work)
        return min(1.0, came / foreseen)

    def rate(self, work: Work) -> float:
        """Tokens per time of t(1) of drafted steps in the long run."""
        tokens, passes, *_ = self._begun(work)
        return tokens / passes

    def rest(self, work: Work, tokens: int, passes: float, own: float, foreseen: float = 1.0) -> int:
        """Count a drafted step: its tokens, the `passes` it took, `own` of them for drafting; return for how many steps
        to draft nothing: some, where drafting does not pay in the long run, unless this step was to pay by the tokens
        `foreseen`. The long run is that of all texts here, since one that rests alone saves nothing.
        """
        paid = 1 + self.trust(work) * (foreseen - 1) >= passes
        seen = (tokens - 1, foreseen - 1) if foreseen > 1 else (_FORGOTTEN, _FORGOTTEN)
        step = tokens, passes, *seen
        sums = self._steps[work]
        sums[:] = (_OF_CALL * old + new for old, new in zip(sums, step, strict=True))
        work.gave(*step)
        return 0 if paid or sums[0] >= sums[1] else min(int(own / _LOOKS), _LONGEST)
