"""How much of a draft pays: tokens by time, with the draft model's probabilities as those of being accepted.

A step gives one token and, for every verified node, its probability of being accepted. It costs a pass of the target
over so many nodes (`costs`) and the drafting steps. All times are multiples of the target's pass over a single node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Budget:
    """What the passes of both models cost."""

    verification: np.ndarray
    """(nodes,) float64: a pass of the target over 1, 2, ... nodes, the root included; the first is 1."""
    step: float
    """A drafting step."""

    def best(self, probabilities: Sequence[float], steps: int) -> tuple[int, float]:
        """How many nodes to verify after so many drafting steps, and the tokens by time that they give; the nodes'
        probabilities without the root's, in any order.
        """
        most = len(self.verification) - 1
        likeliest = np.sort(np.asarray(probabilities, dtype=np.float64))[::-1][:most]
        tokens = 1 + np.concatenate([[0.0], likeliest.cumsum()])
        rates = tokens / (self.verification[: len(tokens)] + steps * self.step)
        chosen = int(rates.argmax())
        return chosen, float(rates[chosen])

    def goes_on(self, followed: Sequence[float], probabilities: Sequence[float], steps: int) -> bool:
        """Whether one more drafting step, below nodes of the probabilities `followed`, may give tokens at a better rate
        than the draft has without it: at most one for each of these nodes that is accepted.
        """
        return sum(followed) > self.best(probabilities, steps)[1] * self.step
