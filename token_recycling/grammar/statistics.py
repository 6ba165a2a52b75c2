"""Statistics of the target's choices among the tokens that a grammar allows.

A forced string does not determine its tokenization (`"` or `":`). Initially the longest token is preferred, later the
token that the target chose among the same allowed tokens. If many tokens are allowed, frequent choices of the target,
such as the end of a string, are candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._util.locks import Lock

if TYPE_CHECKING:
    from .state import State

_STATES, _TAKEN = 4096, 48
"""Maximum number of sets of allowed tokens, and the number of choices per set after which all counts are halved."""
_DOUBT_OF_FEW, _DOUBT_OF_MANY = 1.0, 6.0
"""Weight of the prior in choices, if few tokens are allowed and if many are."""
_LIKELY = 6
"""Maximum candidates from the statistics of a large set."""
_WHOLE, _PART = 1.0, 0.04
"""Initial weight of an allowed token, and of a token that is a prefix of another."""

Candidates = list[tuple[int, float]]
"""Tokens with their probabilities."""


class GrammarStatistics:
    """Counts the target's choices by the set of allowed tokens. Shared by several threads."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[int, float]] = {}
        self._weights: dict[int, dict[int, float]] = {}
        self._learning = Lock()

    def learn(self, state: State, token: int) -> None:
        """Count one token that the target chose in a state."""
        with self._learning:
            choices = self._choices.pop(state.key, {})
            if sum(choices.values()) >= _TAKEN:
                choices = {other: number / 2 for other, number in choices.items() if number > 1}
            self._choices[state.key] = {**choices, token: choices.get(token, 0.0) + 1}
            if len(self._choices) > _STATES:
                del self._choices[next(iter(self._choices))]

    def learn_path(self, states: Sequence[State | None], tokens: Sequence[int]) -> None:
        """Count the tokens chosen in known states with more than one allowed token."""
        for state, token in zip(states, tokens, strict=True):
            if state is not None and not state.single:
                self.learn(state, token)

    def probabilities(self, state: State, proposed: Candidates) -> Candidates:
        """Return candidates in a state with their probabilities, from the statistics and from `proposed`, which are all
        allowed.
        """
        if state.few is not None and len(state.few) < 2:
            return [(token, 1.0) for token in state.few]
        choices = self._choices.get(state.key, {})
        total = sum(choices.values())
        guess, proposed_share = dict(proposed), min(1.0, sum(probability for _, probability in proposed))
        if state.few is not None:
            weights = self._weights_of(state)
            left = (1 - proposed_share) / sum(weights.values())
            guess = {token: guess.get(token, 0.0) + left * weight for token, weight in weights.items()}
            doubt = _DOUBT_OF_FEW / (_DOUBT_OF_FEW + total)
            habit = {token: choices.get(token, 0.0) / max(total, 1.0) for token in guess}
            return [(token, doubt * probability + (1 - doubt) * habit[token]) for token, probability in guess.items()]
        share = (1 - proposed_share) / (total + _DOUBT_OF_MANY)
        for token in sorted(choices, key=choices.__getitem__, reverse=True)[:_LIKELY]:
            guess[token] = guess.get(token, 0.0) + share * choices[token]
        return [*guess.items()]

    def _weights_of(self, state: State) -> dict[int, float]:
        weights = self._weights.get(state.key)
        if weights is None:
            if len(self._weights) >= _STATES:
                self._weights.clear()
            weights = self._weights[state.key] = _weights(state)
        return weights


def _weights(state: State) -> dict[int, float]:
    """Return initial weights of a few allowed tokens; prefixes of other tokens have low weights.

    A prefix is recognized by its forced string, which ends with the forced string of the longer token. If a string is
    forced here but none after several of the tokens, the lowest id was merged first; the others extend it.
    """
    tokens = state.few or ()
    if len(tokens) == 1:
        return dict.fromkeys(tokens, _WHOLE)
    rests: dict[int, str] = {}
    for token in tokens:
        after = state.after(token)
        rests[token] = "" if after is None else after.forced
    first = next((token for token, rest in rests.items() if not rest), None) if state.forced else None

    def starts_another(token: int, rest: str) -> bool:
        if first is not None:
            return token != first
        return any(other and len(other) < len(rest) and rest.endswith(other) for other in rests.values())

    return {token: _PART if starts_another(token, rest) else _WHOLE for token, rest in rests.items()}
