"""What the steps of one call, or of texts that come and go, cost: a draft of each of them, verified in one pass.

Every step is timed as it is made, and t(n) learned from it (`costs.online`): for each length of text, shared by all
calls that have as many texts, and kept with the model.
"""

from __future__ import annotations

from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ..costs.curve import CostCurve, band
from ..costs.drafting import Pace
from ..costs.online import OnlineCurve
from .pass_costs import PassCosts


class StepCosts:
    """Of a call with some texts, the longest of `length` tokens. Nothing is measured before it is asked for."""

    def __init__(self, passes: PassCosts, texts: int, length: int, like: torch.Tensor | None = None) -> None:
        """`like` are tokens such as will be drafted, of the prompt."""
        self.passes, self.texts, self.length, self._like = passes, texts, length, like
        self.nodes = 1
        """Of each text in the newest pass: as many as the one had that had most."""
        self._paces: WeakKeyDictionary[Pace, Pace] = WeakKeyDictionary()
        self._online: OnlineCurve | None = None
        """At the length that the texts have now; None as long as nobody has asked what passes cost."""

    @property
    def asked(self) -> bool:
        """Whether a drafter has asked what passes cost."""
        return self._online is not None

    def share(self, texts: int, length: int) -> None:
        """From the next step on so many texts share a pass, the longest of `length` tokens."""
        if self._online is not None and (texts != self.texts or band(length) != band(self.length)):
            self._online = self.passes.online(length, texts, self._like)
        self.texts, self.length = texts, length

    def pace(self, of_drafter: Pace) -> Pace:
        """The pace of all texts here for which a drafter drafts, whose own pace is `of_drafter`."""
        return self._paces.setdefault(of_drafter, of_drafter.of_call())

    @cached_property
    def curve(self) -> CostCurve:
        """t(n) of the target's passes as it was measured, at the length that the texts had at first."""
        return self.passes.curve(self.length, self._like)

    @property
    def plain(self) -> float:
        """Seconds of a step in which nothing is drafted, by that curve."""
        return float(np.interp(self.texts, self.curve.sizes, self.curve.seconds))

    @property
    def by_nodes(self) -> np.ndarray:
        """(nodes,) costs of verifying 1, 2, ... nodes of every text, in passes over one node of each, as learned so
        far.
        """
        return self._now.relative

    def of(self, nodes: int) -> float:
        """The cost of verifying `nodes` nodes of every text; more than there are costs for count as the most."""
        by_nodes = self.by_nodes
        return float(by_nodes[min(nodes, len(by_nodes)) - 1])

    def in_passes(self, seconds: float) -> float:
        """Seconds of work for one text, in passes over one node of each as they go now. The texts of a batch are
        verified together, but drafted for one after another.
        """
        return self.passes.agreed(seconds * self.texts / float(self._now.seconds[0]))

    @property
    def _now(self) -> OnlineCurve:
        if self._online is None:
            self._online = self.passes.online(self.length, self.texts, self._like)
        return self._online

    def took(self, nodes: int, seconds: float, length: int) -> None:
        """A step over `nodes` nodes of each text, the longest of `length` tokens by now, took so long, without drafting
        and learning.
        """
        if self._online is None:
            return
        if band(length) > band(self.length):
            self._online = self.passes.online(length, self.texts, before=self._online)
        self.length = max(length, self.length)
        self._online.took(nodes, self.passes.agreed(seconds))
