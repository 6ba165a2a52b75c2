"""Drafts within a grammar: trees grown best first from allowed candidates and forced tokens.

Where few tokens are allowed, all of them are candidates. A forced string does not determine its tokenization (`"` or
`":`): the longest token is preferred at first, later the one that the target chose among the same allowed tokens
(`GrammarStatistics`). Where many are allowed, tokens that the target often chose there, such as the end of a string,
are added to the drafter's own candidates, with the chain that the grammar forces after them.

Cost: ten microseconds per forced node, some thirty per other node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .._util.locks import Lock
from ..costs.budget import may_pay
from ..trees.best_first import best_first
from .state import State

_STATES, _TAKEN = 4096, 48
"""Most sets of allowed tokens that are kept, and the choices in one after which older ones count half."""
_DOUBT_OF_FEW, _DOUBT_OF_MANY = 1.0, 6.0
"""Choices that a first guess counts for, where few tokens are allowed and where many are."""
_LIKELY, _LEAST = 6, 0.02
"""Most candidates from the statistics of a large set; the lowest probability of a candidate."""
_SURE = 0.8
"""Nothing is added where a token already has this probability."""
_WHOLE, _PART = 1.0, 0.04
"""Initial weight of an allowed token, and of one that is a prefix of another."""

Candidates = list[tuple[int, float]]
"""Tokens with their probabilities."""
Propose = Callable[[int, int, float, State | None], Candidates]
"""Propose candidates after a new node, given its parent, token and probability, and its state where candidates are
used; elsewhere the result is ignored. Called for each node but the root, in order of growth.
"""


class GrammarStatistics:
    """Counts the target's choices by the set of allowed tokens. Used by several threads."""

    def __init__(self) -> None:
        self._taken: dict[int, dict[int, float]] = {}
        self._weights: dict[int, dict[int, float]] = {}
        self._learning = Lock()

    def learn(self, state: State, token: int) -> None:
        """Count one token of the output."""
        with self._learning:
            taken = self._taken.pop(state.key, {})
            if sum(taken.values()) >= _TAKEN:
                taken = {one: number / 2 for one, number in taken.items() if number > 1}
            self._taken[state.key] = {**taken, token: taken.get(token, 0.0) + 1}
            if len(self._taken) > _STATES:
                del self._taken[next(iter(self._taken))]

    def learn_path(self, states: Sequence[State | None], tokens: Sequence[int]) -> None:
        """Count the tokens chosen at places with known states, where there was a choice."""
        for state, token in zip(states, tokens, strict=True):
            if state is not None and not state.single:
                self.learn(state, token)

    def probabilities(self, state: State, proposed: Candidates) -> Candidates:
        """Return candidates after a state with their probabilities, from the statistics and from `proposed`, all
        allowed.
        """
        if state.few is not None and len(state.few) < 2:
            return [(token, 1.0) for token in state.few]
        taken = self._taken.get(state.key, {})
        total = sum(taken.values())
        guess, known = dict(proposed), min(1.0, sum(probability for _, probability in proposed))
        if state.few is not None:
            weights = self._weights_of(state)
            left = (1 - known) / sum(weights.values())
            guess = {token: guess.get(token, 0.0) + left * weight for token, weight in weights.items()}
            doubt = _DOUBT_OF_FEW / (_DOUBT_OF_FEW + total)
            habit = {token: taken.get(token, 0.0) / max(total, 1.0) for token in guess}
            return [(token, doubt * probability + (1 - doubt) * habit[token]) for token, probability in guess.items()]
        share = (1 - known) / (total + _DOUBT_OF_MANY)
        for token in sorted(taken, key=taken.__getitem__, reverse=True)[:_LIKELY]:
            guess[token] = guess.get(token, 0.0) + share * taken[token]
        return [*guess.items()]

    def _weights_of(self, state: State) -> dict[int, float]:
        weights = self._weights.get(state.key)
        if weights is None:
            if len(self._weights) >= _STATES:
                self._weights.clear()
            weights = self._weights[state.key] = _weights(state)
        return weights


def states_of(root: State, parents: Sequence[int], tokens: Sequence[int]) -> list[State | None]:
    """Return the state at each node of a tree (n,); None where the grammar forbids it or the output has ended."""
    states: list[State | None] = [root]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        above = states[parent]
        states.append(None if above is None else above.after(token))
    return states


def _weights(state: State) -> dict[int, float]:
    """Return initial weights of a few allowed tokens; prefixes of other tokens weigh little.

    What is forced after a prefix ends with what is forced after the longer token. Where nothing is forced after several
    tokens, but something before, the lowest id was merged first, and the others extend it.
    """
    tokens = state.few or ()
    if len(tokens) == 1:
        return dict.fromkeys(tokens, _WHOLE)
    rests: dict[int, str] = {}
    for token in tokens:
        after = state.after(token)
        rests[token] = "" if after is None else after.forced
    first = next((token for token, rest in rests.items() if not rest), None) if state.forced else None

    def begins_another(token: int, rest: str) -> bool:
        if first is not None:
            return token != first
        return any(other and len(other) < len(rest) and rest.endswith(other) for other in rests.values())

    return {token: _PART if begins_another(token, rest) else _WHOLE for token, rest in rests.items()}


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
    """Grow a tree of up to `most` nodes below the root, whose token is given and whose candidates are `first`.

    Nodes are no deeper than `max_depth`. As many are kept as pay by `costs` (m,), times of steps over 1, 2, ... nodes,
    and by the forecast `ratio`; without costs all.
    """
    times = costs.tolist()
    parents, tokens, confidence = [-1], [token], [1.0]
    values, depths, states = [1.0], [0], list[State | None]([root])
    expected, size = 1.0 / ratio, 1
    best = expected / times[0] if times else 0.0
    most = min(most, len(times) - 1) if times else most

    def children(node: int) -> list[tuple[float, tuple[int, float]]]:
        found = _following(node) if node else grammar_statistics.probabilities(root, first)
        if depths[node] >= max_depth:
            return []
        return [
            (values[node] * probability, (token, probability)) for token, probability in found if probability >= _LEAST
        ]

    def _following(node: int) -> Candidates:
        """Return the candidates after the newest node; `propose` is called for every node."""
        after, candidates = states[node], Candidates()
        if after is not None and after.few is not None:
            candidates = grammar_statistics.probabilities(after, [])
        sure = after is None or (after.few is not None and max((one for _, one in candidates), default=1.0) >= _SURE)
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
