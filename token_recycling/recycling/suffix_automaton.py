"""What followed the last time: a suffix automaton over a growing text, queried after real or hypothetical tokens.

The online construction of Blumer et al. (1985), amortised constant time a token; SAM-Decoding (2411.10666) drafts with
it. A state stands for a set of substrings that end at the same places of the text. The state of the longest suffix that
stood there before is the match. A drafted token moves a match on without changing the automaton.

The automaton lies in arrays for compiled functions: some 100 bytes a token. States are numbered in order of creation;
state 0 is the empty string. A state's transitions are a linked list, and found through one hash table for all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part


class AutomatonArrays(NamedTuple):
    """The arrays of a `SuffixAutomaton`, for compiled functions; s states, e transitions."""

    tokens: np.ndarray
    """(capacity,) int64: the text."""
    counts: np.ndarray
    """(6,) int64: states, transitions, the state of the whole text, that of its match, tokens, and how many of the
    transitions are in the table.
    """
    link: np.ndarray
    """(s,) int32: the state of the longest suffix that ends at other places too."""
    length: np.ndarray
    """(s,) int32: of the longest substring of the state."""
    end: np.ndarray
    """(s,) int32: a place where the substrings ended; of a state that was matched, the place of the last match, since
    what followed later is more likely to follow again."""
    first: np.ndarray
    """(s,) int32: the first transition of a state, -1 for none."""
    edge_state: np.ndarray
    """(e,) int32: where a transition starts, ..."""
    edge_token: np.ndarray
    """... (e,) int32: the token that it takes, ..."""
    edge_target: np.ndarray
    """... (e,) int32: where it leads, ..."""
    edge_next: np.ndarray
    """... (e,) int32: and the next one of the same state, -1 for none."""
    table: np.ndarray
    """(a power of two,) int32: transitions by hash of state and token, -1 where free."""


@compiled_part
def _place(state: int, token: int, size: int) -> int:
    return (state * 2_654_435_761 + token * 40_503 + (state >> 7)) & (size - 1)


@compiled_part
def find_edge(automaton: AutomatonArrays, state: int, token: int) -> int:
    """The transition of a state for a token, or -1."""
    size = len(automaton.table)
    place = _place(state, token, size)
    while True:
        edge = automaton.table[place]
        if edge < 0 or (automaton.edge_state[edge] == state and automaton.edge_token[edge] == token):
            return edge
        place = (place + 1) & (size - 1)


@compiled_part
def _add_edge(automaton: AutomatonArrays, state: int, token: int, target: int) -> None:
    edge = automaton.counts[1]
    automaton.counts[1] += 1
    automaton.edge_state[edge], automaton.edge_token[edge] = state, token
    automaton.edge_target[edge], automaton.edge_next[edge] = target, automaton.first[state]
    automaton.first[state] = edge
    _enter(automaton, edge)


@compiled_part
def _enter(automaton: AutomatonArrays, edge: int) -> None:
    """Enters a transition into the table."""
    automaton.counts[5] += 1
    size = len(automaton.table)
    place = _place(np.int64(automaton.edge_state[edge]), np.int64(automaton.edge_token[edge]), size)
    while automaton.table[place] >= 0:
        place = (place + 1) & (size - 1)
    automaton.table[place] = edge


@compiled_part
def _add_state(automaton: AutomatonArrays, length: int) -> int:
    state = automaton.counts[0]
    automaton.counts[0] += 1
    automaton.length[state], automaton.first[state] = length, -1
    return state


@compiled
def _extend(automaton: AutomatonArrays, tokens: np.ndarray) -> None:
    counts, link, length, end = automaton.counts, automaton.link, automaton.length, automaton.end
    for edge in range(counts[5], counts[1]):
        _enter(automaton, edge)
    for token in tokens:
        place = counts[4]
        automaton.tokens[place] = token
        counts[4] += 1
        end[counts[3]] = place - 1
        new = _add_state(automaton, length[counts[2]] + 1)
        link[new], end[new] = 0, place
        state, edge = counts[2], find_edge(automaton, counts[2], token)
        while edge < 0:
            _add_edge(automaton, state, token, new)
            state = np.int64(link[state])
            if state < 0:
                break
            edge = find_edge(automaton, state, token)
        if state >= 0:
            target = automaton.edge_target[edge]
            if length[target] > length[state] + 1:
                copy = _add_state(automaton, length[state] + 1)
                link[copy], end[copy] = link[target], end[target]
                edge = automaton.first[target]
                while edge >= 0:
                    following = np.int64(automaton.edge_target[edge])
                    _add_edge(automaton, copy, np.int64(automaton.edge_token[edge]), following)
                    edge = automaton.edge_next[edge]
                link[target] = copy
                while state >= 0:
                    edge = find_edge(automaton, state, token)
                    if edge < 0 or automaton.edge_target[edge] != target:
                        break
                    automaton.edge_target[edge] = copy
                    state = np.int64(link[state])
                target = copy
            link[new] = target
        counts[2], counts[3] = new, link[new]


@compiled_part
def advance(automaton: AutomatonArrays, state: int, length: int, token: int) -> tuple[int, int]:
    """State and length of a match after one more token, which is hypothetical."""
    edge = find_edge(automaton, state, token)
    while edge < 0 and state > 0:
        state = np.int64(automaton.link[state])
        length = np.int64(automaton.length[state])
        edge = find_edge(automaton, state, token)
    if edge < 0:
        return 0, 0
    return np.int64(automaton.edge_target[edge]), length + 1


@compiled_part
def following(automaton: AutomatonArrays, state: int) -> int:
    """The token that followed where the match was last seen before the end of the text, or -1."""
    last = automaton.counts[4] - 1
    if automaton.end[state] == last:  # the whole text: what repeats it is its own beginning
        state = automaton.link[state]
    return automaton.tokens[automaton.end[state] + 1] if state > 0 else -1


@compiled
def _branch(automaton: AutomatonArrays, found: np.ndarray) -> int:
    """Fills in what followed, as far as anything did; returns how many tokens."""
    state = automaton.counts[3]
    length = np.int64(automaton.length[state])
    for place in range(len(found)):
        token = following(automaton, state)
        if token < 0:
            return place
        found[place] = token
        state, length = advance(automaton, state, length, token)
    return len(found)


class SuffixAutomaton:
    """All substrings of the tokens so far, and what followed them."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.arrays = _arrays(0)
        self.extend(tokens)

    def __len__(self) -> int:
        return int(self.arrays.counts[4])

    @property
    def match(self) -> tuple[int, int]:
        """State and length of the longest suffix of the text that stands earlier in it; both are 0 if there is none."""
        state = int(self.arrays.counts[3])
        return state, int(self.arrays.length[state])

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text; capacity grows by doubling."""
        added = np.ascontiguousarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int64)
        if not len(added):  # nor is anything compiled for nothing
            return
        if len(self) + len(added) > len(self.arrays.tokens):
            self.arrays = _arrays(2 * (len(self) + len(added)), self.arrays)
        _extend(self.arrays, added)

    def branch(self, most: int) -> np.ndarray:
        """(up to `most`,) int64: what followed the match, then what followed with that, and so on; where the text
        loops, the branch repeats the loop.
        """
        found = np.empty(most, np.int64)
        return found[: _branch(self.arrays, found)]


def _arrays(tokens: int, before: AutomatonArrays | None = None) -> AutomatonArrays:
    """Arrays with a capacity of `tokens`, holding the contents of `before`: n tokens make at most 2n states and 3n
    transitions.
    """
    states, edges = 2 * tokens + 2, 3 * tokens + 3
    made = AutomatonArrays(
        tokens=np.empty(tokens, np.int64),
        counts=np.zeros(6, np.int64),
        **{name: np.empty(states, np.int32) for name in ("link", "length", "end", "first")},
        **{name: np.empty(edges, np.int32) for name in ("edge_state", "edge_token", "edge_target", "edge_next")},
        table=np.full(1 << (2 * edges - 1).bit_length(), -1, np.int32),
    )
    if before is None:
        made.counts[0] = 1
        made.link[0], made.length[0], made.end[0], made.first[0] = -1, 0, -1, -1
        return made
    for new, old in zip(made[:-1], before[:-1], strict=True):
        new[: len(old)] = old
    made.counts[5] = 0
    return made
