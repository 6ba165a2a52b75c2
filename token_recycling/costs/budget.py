"""Tree size: as many nodes as give the most expected tokens per time, given t(n), the cost of verifying n nodes.

A step emits one token, and every verified node adds its probability of being accepted. Its forward pass costs t(n), the
root included. Taken most probable first, further nodes pay as long as the expected tokens per time rise: the tree form
of the threshold of SpecDec++ (2405.19715, theorem 3.1). Every size is decided here: of trees that grow node by node
(`may_pay`), of drafts that are pruned once they are made (`paying_size`), and of passes of a draft model
(`Budget.pays`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .._util.compiled import compiled_part

NO_COSTS = np.empty(0)
"""Instead of t(n): every node pays."""
EVERY_NODE = np.ones(4097)
"""The same, for at most so many nodes."""


@compiled_part
def may_pay(costs: np.ndarray | Sequence[float], nodes: int, expected: float, rate: float, gain: float) -> bool:
    """Whether more nodes, which gain `gain` each at most, may give a better rate than `rate` tokens per time."""
    if not len(costs):
        return True
    for more in range(1, len(costs) - nodes + 1):  # noqa: SIM110 - compiled
        if expected + more * gain > rate * costs[nodes + more - 1]:
            return True
    return False


def least_gain(costs: np.ndarray, roots: int, expected: np.ndarray) -> float:
    """Return the gain above which one more node may give a better rate; infinite where no more fit.

    `expected` (1 + n,): tokens of `roots` nodes alone, with the first added one, with two, and so on. `costs` as in
    `may_pay`, in which the batch has `roots + n` nodes.
    """
    further = costs[roots + len(expected) - 1 :]
    if not len(further):
        return math.inf
    rate = (expected / costs[roots - 1 : roots - 1 + len(expected)]).max()
    return max(0.0, float(((rate * further - expected[-1]) / np.arange(1, len(further) + 1)).min()))


def paying_prefix(costs: np.ndarray, roots: int, expected: np.ndarray) -> int:
    """Return how many added nodes give the most expected tokens per time, the most of equally good numbers; see
    `least_gain`.
    """
    costs = costs[roots - 1 : roots - 1 + len(expected)]
    rates = expected[: len(costs)] / costs
    return len(rates) - 1 - int(np.argmax(rates[::-1])) if len(rates) else 0


def best_size(probabilities: Sequence[float] | np.ndarray, times: np.ndarray) -> tuple[int, float]:
    """Return how many nodes to verify besides the root, and the tokens per time that they give.

    `probabilities` are those of the nodes, in any order; `times` (most + 1,) of steps over 1, 2, ... nodes.
    """
    values = np.append(1.0, np.sort(np.asarray(probabilities, dtype=np.float64))[::-1])
    size = paying_size([values], times)
    return size - 1, float(values[:size].sum() / times[size - 1])


def paying_size(values: Sequence[np.ndarray], times: np.ndarray, least: int = 1) -> int:
    """Return how many nodes of each sequence to verify, `least` or more, for the most expected tokens per time.

    `values` holds for each sequence the acceptance probabilities of its nodes, the root's 1 first, in the order in
    which nodes are taken; `times` (most,) are those of steps over 1, 2, ... nodes of every sequence. Of equally good
    sizes the smallest is taken.
    """
    most = min(len(times), max(map(len, values), default=1))
    if most <= least:
        return least
    expected = np.zeros(most)
    for own in values:
        taken = own[:most].cumsum()
        expected += np.concatenate([taken, np.full(most - len(taken), taken[-1])])
    return least + int(np.argmax(expected[least - 1 :] / times[least - 1 : most]))


class Budget:
    """What one draft may cost, in units of t(1). The loop gives one with every context."""

    def __init__(
        self,
        verifying: np.ndarray = EVERY_NODE,
        ratio: float = 1.0,
        *,
        step: float = 0.0,
        node: float = 0.0,
        of_pass: float = 0.0,
    ) -> None:
        """`verifying` (m,) float64: time of verifying 1, 2, ... nodes. `ratio`: the forecast ratio, which scales what
        nodes are expected to gain. `step`, `node` and `of_pass`: drafting overhead of a step, of each drafted node and
        of each pass of a draft model.
        """
        self.verifying, self.ratio = verifying, ratio
        self.step, self.node, self.of_pass = step, node, of_pass
        self.passes = 0
        """Passes of draft models so far."""

    @classmethod
    def of_nodes(cls, nodes: int) -> Budget:
        """Return the budget of a draft of a given size: every one of its nodes pays."""
        return cls(np.ones(1 + nodes))

    def for_part(self, nodes: int | str | None) -> Budget:
        """Return the budget of a part of a fused drafter, whose traits have these `nodes`."""
        if nodes is None:
            return Budget()
        return self if isinstance(nodes, str) else Budget.of_nodes(nodes)

    @property
    def nodes(self) -> int:
        """Maximum number of drafted nodes, the root left out."""
        return len(self.verifying) - 1

    @property
    def overhead(self) -> float:
        """Drafting overhead so far, without that of the nodes."""
        return self.step + self.passes * self.of_pass

    @property
    def times(self) -> np.ndarray:
        """(m,) float64: time of a step over 1, 2, ... nodes, drafting included."""
        return self.verifying + self.overhead + self.node * np.arange(len(self.verifying))

    def pays(self, gains: Sequence[float], drafted: Sequence[float] = ()) -> bool:
        """Whether one more pass of a draft model may give tokens at a better rate: below nodes of the probabilities
        `gains`, one token for each at most, where nodes of the probabilities `drafted` are there. Counts the pass.
        """
        if self.nodes < 1:
            return False
        if self.of_pass:
            _, rate = best_size(self.ratio * np.asarray(drafted, np.float64), self.times)
            if self.ratio * sum(gains) <= rate * self.of_pass:
                return False
        self.passes += 1
        return True


UNLIMITED = Budget()
"""Every node pays; for reading only."""
