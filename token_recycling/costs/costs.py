"""What the steps of texts that share passes take: the one object that whoever decides a size asks.

Every step is timed as it is made, and t(n), the time of a pass over n nodes of each text, learned from it (`online`).
All is in units of t(1). Cost per step: that of `online`.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary

import numpy as np

from .drafting import Work
from .online import OnlineCurve, band

_OF_CALL = 0.98
"""What older steps of a call count for, with every new one, where it is decided whether drafting pays."""
_FORGOTTEN = 0.2
"""Tokens, foreseen and come, that a step without a draft counts as: forecasts are believed again in time, since what is
not believed is not tried.
"""
_LOOKS, _LONGEST = 0.01, 64
"""Where drafting does not pay, it is tried again so often that this takes a hundredth of the time, or every 64 steps.
"""


class Costs:
    """Of a call with some texts, the longest of `length` tokens; or of texts that come and go."""

    def __init__(
        self,
        curve_of: Callable[[int, int], OnlineCurve],
        texts: int,
        length: int,
        agreed: Callable[[float], float] = float,
    ) -> None:
        """`curve_of` gives the curve of so many texts of a length; `agreed` makes a time one that all processes that
        share the model take for true.
        """
        self.texts, self.length = texts, length
        self.nodes = 1
        """Of each text in the newest pass: as many as the one had that had most."""
        self._curve_of, self._agreed = curve_of, agreed
        self._curve: OnlineCurve | None = None
        """At the length that the texts have now; None as long as nobody has asked what passes cost."""
        self._steps: WeakKeyDictionary[Work, list[float]] = WeakKeyDictionary()
        """What the steps here gave and took (`Work.begun`), by what drafted them."""

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
        by_nodes = self.by_nodes
        return float(by_nodes[min(nodes, len(by_nodes)) - 1])

    def in_passes(self, seconds: float) -> float:
        """Seconds of work for one text, in passes over one node of each as they go now. The texts of a batch are
        verified together, but drafted for one after another.
        """
        return self._agreed(seconds * self.texts / float(self._now.seconds[0]))

    @property
    def _now(self) -> OnlineCurve:
        if self._curve is None:
            self._curve = self._curve_of(self.texts, self.length)
        return self._curve

    def share(self, texts: int, length: int) -> None:
        """From the next step on so many texts share a pass, the longest of `length` tokens."""
        if self._curve is not None and (texts, band(length)) != (self.texts, band(self.length)):
            self._curve = self._curve_of(texts, length)
        self.texts, self.length = texts, length

    def took(self, nodes: int, seconds: float, length: int) -> None:
        """A step over `nodes` nodes of each text, the longest of `length` tokens by now, took so long, without drafting
        and learning.
        """
        if self._curve is not None:
            self.share(self.texts, max(length, self.length))
            self._curve.took(nodes, self._agreed(seconds))

    def trust(self, work: Work) -> float:
        """The share of the tokens foreseen that has come, 1 at most: by which forecasts are to be corrected."""
        _, _, came, foreseen = self._steps.setdefault(work, work.begun())
        return min(1.0, came / foreseen)

    def rest(self, work: Work, tokens: int, passes: float, own: float, foreseen: float = 1.0) -> int:
        """Counts what a drafted step gave and took in passes, `own` of them whether or not anything was verified;
        returns for how many steps nothing is to be drafted: some, where drafting does not pay in the long run, unless
        this step was to pay by the tokens `foreseen`.

        The long run is that of all texts here: a pass takes as long as the largest tree among them wants, so that one
        that rests alone saves nothing. It begins with what `work` knows of all texts before.
        """
        paid = 1 + self.trust(work) * (foreseen - 1) >= passes
        seen = (tokens - 1, foreseen - 1) if foreseen > 1 else (_FORGOTTEN, _FORGOTTEN)
        step = tokens, passes, *seen
        sums = self._steps[work]
        sums[:] = (_OF_CALL * old + new for old, new in zip(sums, step, strict=True))
        work.gave(*step)
        return 0 if paid or sums[0] >= sums[1] else min(int(own / _LOOKS), _LONGEST)
