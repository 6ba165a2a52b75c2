"""Drafts within a grammar: trees grown best first from candidates that it allows, and from what it forces.

Where only a few tokens are allowed, all of them are candidates. A forced string does not determine its tokens (`"` or
`":`): the longest token is likely at first, later the one that the target chose where the same tokens were allowed
(`GrammarStatistics`). Where many are allowed, tokens that the target often chose there, such as the end of a string,
are candidates besides the drafter's own, with the chain that the grammar forces after them.

Cost: ten microseconds a forced node, some thirty another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from .._util.locks import Lock
from ..costs.budget import may_pay
from ..trees.best_first import best_first
from ..trees.constraint import State

_STATES, _TAKEN = 4096, 48
"""Most sets of allowed tokens that are remembered, and the tokens taken of one before older ones count half."""
_DOUBT_OF_FEW, _DOUBT_OF_MANY = 1.0, 6.0
"""Tokens taken that a first guess counts for, where a few may follow and where many may."""
_LIKELY, _LEAST = 6, 0.02
"""Most candidates of a set of many by habit; the least chance of a candidate."""
_SURE = 0.8
"""Nothing is proposed where a token is so likely already."""
_WHOLE, _PART = 1.0, 0.04
"""Weights of an allowed token as long as nothing is known, and of one that is the beginning of another."""

Candidates = list[tuple[int, float]]
"""Tokens and how likely each is."""
Propose = Callable[[int, int, float, State | None], Candidates]
"""What may follow a new node, of which is given its parent, its token, its chance, and its state where it matters what
else is known: elsewhere nothing is proposed. Called for each node but the root, in order of growth.
"""


class GrammarStatistics:
    """Which of the tokens that were allowed the target took, by the set of allowed ones. Used by several threads."""

    def __init__(self) -> None:
        self._taken: dict[int, dict[int, float]] = {}
        self._weights: dict[int, dict[int, float]] = {}
        self._learning = Lock()

    def learn(self, state: State, token: int) -> None:
        """Count a token of the sequence."""
        with self._learning:
            taken = self._taken.pop(state.key, {})
            if sum(taken.values()) >= _TAKEN:
                taken = {one: number / 2 for one, number in taken.items() if number > 1}
            self._taken[state.key] = {**taken, token: taken.get(token, 0.0) + 1}
            if len(self._taken) > _STATES:
                del self._taken[next(iter(self._taken))]

    def learn_path(self, states: Sequence[State | None], tokens: Sequence[int]) -> None:
        """Count the tokens that were taken at places whose states are known, where there was a choice."""
        for state, token in zip(states, tokens, strict=True):
            if state is not None and not state.single:
                self.learn(state, token)

    def probabilities(self, state: State, proposed: Candidates) -> Candidates:
        """How likely tokens follow a state, by habit and by what is `proposed`, which it allows."""
        if state.few is not None and len(state.few) < 2:
            return [(token, 1.0) for token in state.few]
        taken = self._taken.get(state.key, {})
        total = sum(taken.values())
        guess, known = dict(proposed), min(1.0, sum(chance for _, chance in proposed))
        if state.few is not None:
            weights = self._weights_of(state)
            left = (1 - known) / sum(weights.values())
            guess = {token: guess.get(token, 0.0) + left * weight for token, weight in weights.items()}
            doubt = _DOUBT_OF_FEW / (_DOUBT_OF_FEW + total)
            habit = {token: taken.get(token, 0.0) / max(total, 1.0) for token in guess}
            return [(token, doubt * chance + (1 - doubt) * habit[token]) for token, chance in guess.items()]
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
    """The state at each node of a tree (n,), None where the grammar forbids it or the sequence has ended."""
    states: list[State | None] = [root]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        above = states[parent]
        states.append(None if above is None else above.after(token))
    return states


def _weights(state: State) -> dict[int, float]:
    """How likely each of a few tokens is as long as nothing is known: of tokens that begin another one, little.

    What is forced after a token that begins another ends with what is forced after the other. Where nothing is forced
    after several, but something before, the lowest number was merged first, so that the others go on from it.
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
    room: int,
    most: int,
    costs: np.ndarray,
    ratio: float = 1.0,
) -> Nodes:
    """Grow a tree of up to `most` nodes below the root, whose token is given and after which `first` may follow.

    Nodes stand no deeper than `room`; as many are kept as pay by `costs` (m,), times of steps over 1, 2, ... nodes, and
    by the forecast `ratio`; all if there are no costs.
    """
    times = costs.tolist()
    parents, tokens, confidence = [-1], [token], [1.0]
    values, depths, states = [1.0], [0], list[State | None]([root])
    expected, size = 1.0 / ratio, 1
    best = expected / times[0] if times else 0.0
    most = min(most, len(times) - 1) if times else most

    def children(node: int) -> list[tuple[float, tuple[int, float]]]:
        found = _following(node) if node else grammar_statistics.probabilities(root, first)
        if depths[node] >= room:
            return []
        return [(values[node] * chance, (token, chance)) for token, chance in found if chance >= _LEAST]

    def _following(node: int) -> Candidates:
        """What may follow the newest node; `propose` is called for every node."""
        after, candidates = states[node], Candidates()
        if after is not None and after.few is not None:
            candidates = grammar_statistics.probabilities(after, [])
        sure = after is None or (after.few is not None and max((one for _, one in candidates), default=1.0) >= _SURE)
        proposed = propose(parents[node], tokens[node], confidence[node], None if sure else after)
        if after is not None and (proposed or after.few is None):
            candidates = grammar_statistics.probabilities(after, proposed)
        return candidates

    for parent, value, (token, chance) in best_first(children):
        number, above = len(tokens), states[parent]
        if number > most or not may_pay(times, number, expected, best, value):
            break
        parents.append(parent)
        tokens.append(token)
        confidence.append(chance)
        values.append(value)
        depths.append(depths[parent] + 1)
        states.append(None if above is None else above.after(token))
        expected += value
        if not times or expected / times[number] > best:
            best, size = expected / times[number] if times else 0.0, number + 1
    return parents[:size], tokens[:size], confidence[:size]
