"""Tree size: as many nodes as give the most expected tokens per time, given t(n), the cost of verifying n nodes.

A step emits one token, and every verified node adds its probability of being accepted. Its forward pass costs t(n), the
root included. Taken most probable first, further nodes pay as long as the expected tokens per time rise: the tree form
of the threshold of SpecDec++ (2405.19715, theorem 3.1). Every size is decided here: of trees that grow in compiled code
(`may_pay`), of drafts that are cut once they are made (`best_size`), of drafting steps of a model (`step_pays`), and of
the trees of sequences that share a pass (`paying_size`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._util.compiled import compiled_part

NO_COSTS = np.empty(0)
"""Instead of t(n): every node pays."""


@compiled_part
def may_pay(costs: np.ndarray | Sequence[float], nodes: int, expected: float, rate: float, gain: float) -> bool:
    """Whether more nodes, which gain `gain` each at most, may give a better rate than `rate` tokens per time."""
    if not len(costs):
        return True
    for more in range(1, len(costs) - nodes + 1):  # noqa: SIM110 - compiled
        if expected + more * gain > rate * costs[nodes + more - 1]:
            return True
    return False


def paying_nodes(expected: np.ndarray, costs: np.ndarray) -> int:
    """Return the index of the most expected tokens per time, of tokens (n,) and costs (n,); the first of equal ones."""
    return int(np.argmax(expected / costs))


def best_size(probabilities: Sequence[float] | np.ndarray, times: np.ndarray) -> tuple[int, float]:
    """How many nodes to verify besides the root, and the tokens per time that they give, for nodes of these
    probabilities in any order; `times` (most + 1,) are those of steps over 1, 2, ... nodes.
    """
    likeliest = np.sort(np.asarray(probabilities, dtype=np.float64))[::-1][: len(times) - 1]
    expected = 1 + np.concatenate([[0.0], np.cumsum(likeliest)])
    nodes = paying_nodes(expected, times[: len(expected)])
    return nodes, float(expected[nodes] / times[nodes])


def paying_size(chances: Sequence[np.ndarray], costs: np.ndarray, least: int = 1) -> int:
    """How many nodes of each text to verify, `least` or more, so that a pass brings the most expected tokens per time.

    `chances` (n,) holds, for each text that drafts, its nodes' probabilities of being accepted, the root's 1 included;
    `costs` (most,) are the times of passes over 1, 2, ... nodes of every text.
    """
    most = min(len(costs), max(map(len, chances), default=1))
    if most <= least:
        return least
    expected = np.zeros(most)
    for own in chances:
        best = np.sort(own)[::-1][:most].cumsum()
        expected += np.concatenate([best, np.full(most - len(best), best[-1])])
    return least + paying_nodes(expected[least - 1 :], costs[least - 1 : most])


def step_pays(followed: Sequence[float], probabilities: Sequence[float], times: np.ndarray, step: float) -> bool:
    """Whether one more drafting step, which takes `step`, below nodes of the probabilities `followed`, may give tokens
    at a better rate: one for each of these nodes at most. `times` as in `best_size`, the steps so far included.
    """
    return sum(followed) > best_size(probabilities, times)[1] * step
