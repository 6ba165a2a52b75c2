"""Drafts within a grammar: trees grown best-first from allowed candidates and forced tokens.

If few tokens are allowed, all of them are candidates. If many are allowed, tokens that the target often chose in that
state (`statistics`) are added to the drafter's own candidates. Forced chains follow the candidates.

Cost: about 10 microseconds per forced node, and 30 per other node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..costs import may_pay
from ..trees.best_first import best_first
from .state import State
from .statistics import Candidates, GrammarStatistics

_LEAST = 0.02
"""Minimum probability of a candidate."""
_SURE = 0.8
"""The drafter proposes no candidates if an allowed token already has this probability."""

Propose = Callable[[int, int, float, State | None], Candidates]
"""Returns candidates after a new node, given its parent, token, probability and state. The state is None if the
candidates will be ignored. Called for each node except the root, in order of growth.
"""


def states_of(root: State, parents: Sequence[int], tokens: Sequence[int]) -> list[State | None]:
    """Return the state at each of n nodes; None at a forbidden node and after the end of the output."""
    states: list[State | None] = [root]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        above = states[parent]
        states.append(None if above is None else above.after(token))
    return states


Nodes = tuple[list[int], list[int], list[float]]
"""Parents, tokens and confidence of a draft, in order of growth."""


def grow(
    root: State,
    first: Candidates,
    token: int,
    propose: Propose,
    grammar_statistics: GrammarStatistics,
    max_depth: int,
    most: int,
    costs: np.ndarray,
    ratio: float = 1.0,
) -> Nodes:
    """Grow a tree of up to `most` nodes below a root with the token `token` and the candidates `first`.

    No node is deeper than `max_depth`. The tree is cut at the size that maximizes expected tokens per second, given
    `costs` (m,), the times of steps over 1, 2, ... nodes, and the forecast `ratio`. Without costs, all nodes are kept.
    """
    times = costs.tolist()
    parents, tokens, confidence = [-1], [token], [1.0]
    values, depths, states = [1.0], [0], list[State | None]([root])
    expected, size = 1.0 / ratio, 1
    best = expected / times[0] if times else 0.0
    most = min(most, len(times) - 1) if times else most

    def children(node: int) -> list[tuple[float, tuple[int, float]]]:
        following = _following(node) if node else grammar_statistics.probabilities(root, first)
        if depths[node] >= max_depth:
            return []
        return [
            (values[node] * probability, (token, probability))
            for token, probability in following
            if probability >= _LEAST
        ]

    def _following(node: int) -> Candidates:
        """Return the candidates after the newest node; `propose` is called for every node."""
        after, candidates = states[node], Candidates()
        if after is not None and after.few is not None:
            candidates = grammar_statistics.probabilities(after, [])
        sure = after is None or (
            after.few is not None and max((probability for _, probability in candidates), default=1.0) >= _SURE
        )
        proposed = propose(parents[node], tokens[node], confidence[node], None if sure else after)
        if after is not None and (proposed or after.few is None):
            candidates = grammar_statistics.probabilities(after, proposed)
        return candidates

    for parent, value, (token, probability) in best_first(children):
        number, above = len(tokens), states[parent]
        if number > most or not may_pay(times, number, expected, best, value):
            break
        parents.append(parent)
        tokens.append(token)
        confidence.append(probability)
        values.append(value)
        depths.append(depths[parent] + 1)
        states.append(None if above is None else above.after(token))
        expected += value
        if not times or expected / times[number] > best:
            best, size = expected / times[number] if times else 0.0, number + 1
    return parents[:size], tokens[:size], confidence[:size]
