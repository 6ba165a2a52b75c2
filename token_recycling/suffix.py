"""What followed the last time: a suffix automaton over a text that grows, asked after every token or in thought.

The online construction of Blumer et al. (1985), amortised constant time a token; for speculative decoding it was used
first by SAM-Decoding (2411.10666). A state stands for a set of substrings with the same places in the text. The state
after the whole text is the longest suffix that stood there before; what followed it is the draft. A drafted token moves
the state on without changing the automaton, so that every node of a tree has a match of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Match(NamedTuple):
    """The longest suffix of a text, a drafted path included, that stands earlier in the text."""

    state: int
    """Of the automaton; 0 is the empty match."""
    length: int
    """In tokens."""


NO_MATCH = Match(0, 0)


class SuffixAutomaton:
    """All substrings of the tokens so far. Two states a token at most, some 500 bytes each."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self.match = NO_MATCH
        """Of the whole text, with a place earlier in it."""
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        # Where the substrings of a state ended when they were last seen, as a place in `tokens`; of a state that was
        # matched, the place of that match, since what followed later is more likely to follow again.
        self._end = [-1]
        self._last = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Puts tokens at the end of the text."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        following, link, length, end = self._next, self._link, self._length, self._end
        place = len(self.tokens)
        end[self.match.state] = place - 1
        self.tokens.append(token)
        new = self._state({}, 0, length[self._last] + 1, place)
        state = self._last
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            target = following[state][token]
            if length[target] > length[state] + 1:
                copy = self._state(following[target].copy(), link[target], length[state] + 1, end[target])
                link[target] = copy
                while state >= 0 and following[state].get(token) == target:
                    following[state][token] = copy
                    state = link[state]
                target = copy
            link[new] = target
        self._last = new
        self.match = Match(link[new], length[link[new]])

    def _state(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._length) - 1

    def advance(self, match: Match, token: int) -> Match:
        """The match after one more token, which is only thought of: the text stays as it is."""
        state, length = match
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token not in self._next[state]:
            return NO_MATCH
        return Match(self._next[state][token], length + 1)

    def following(self, match: Match) -> int | None:
        """The token that followed where the match was last seen before the end of the text; None if there is none."""
        state = match.state
        if self._end[state] == len(self.tokens) - 1:  # the whole text: what repeats it is its own beginning
            state = self._link[state]
        return self.tokens[self._end[state] + 1] if state > 0 else None
