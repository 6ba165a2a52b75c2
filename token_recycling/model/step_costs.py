"""What the steps of one call cost: a draft of each of its texts, verified in one pass.

Every step is timed as it is made, so that time spent on drafting can be compared with what passes take now: a curve has
the best times of quiet moments, drafting takes as long as it does beside everything else on the machine.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..costs.curve import CostCurve
from .pass_costs import PassCosts

_MEMORY = 0.98
"""Share that older steps keep with every new one."""


class StepCosts:
    """Of a call with some texts, the longest of `length` tokens. Nothing is measured before it is asked for."""

    def __init__(self, passes: PassCosts, texts: int, length: int) -> None:
        self.passes, self.texts, self.length = passes, texts, length
        self._timed: np.ndarray | None = None
        """Seconds of passes and their costs, added up; None as long as nobody has asked what they cost."""

    @cached_property
    def curve(self) -> CostCurve:
        """t(n) of the target's passes over n nodes, at this length."""
        return self.passes.curve(self.length)

    @cached_property
    def by_nodes(self) -> np.ndarray:
        """(nodes,) costs of verifying 1, 2, ... nodes of every text, in passes over one node of each."""
        return self.curve.relative(self.texts)

    @property
    def plain(self) -> float:
        """Seconds of a step in which nothing is drafted, by the curve."""
        return float(np.interp(self.texts, self.curve.sizes, self.curve.seconds))

    @property
    def unit(self) -> float:
        """Seconds of one text's share in a pass of cost 1, as passes go now. The texts of a batch are verified
        together, but drafted for one after another.
        """
        if self._timed is None:
            self._timed = np.array([self.plain, self.by_nodes[0]])
        seconds, cost = self._timed
        return float(seconds / cost) / self.texts

    def took(self, nodes: int, seconds: float) -> None:
        """A step over `nodes` nodes of each text took so long, without drafting and learning."""
        if self._timed is not None:
            self._timed = _MEMORY * self._timed + (seconds, self.by_nodes[min(nodes, len(self.by_nodes)) - 1])
