"""Trees grown best first: at each step the nodes most likely to be accepted, as many as pay.

What may follow a node is known from several sources: the rows of its last one to four tokens (`contexts`) and, after a
match with the text so far, what followed there (`suffix`). They are mixed as in an interpolated n-gram model (Jelinek
and Mercer 1980): a longer context has a fixed weight against all shorter ones, the suffix a weight that rises with the
length of the match. The mixture is then calibrated (`calibration`).

A node's value is the product of these probabilities from the root, and its gain in expected tokens (Sequoia,
2402.12374, section 4.1; here for every step anew, as in EAGLE-2). Gains fall in the order of growth, so that the tree
ends where no further nodes can raise the expected tokens per time, given the cost t(n) of a forward pass over n nodes:
the tree form of the threshold of SpecDec++ (2405.19715, theorem 3.1).

Cost per step: about a microsecond a node, in compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from .calibration import cell_of, chance, count, match_kind
from .ngram_matrix import FULL, Rows, find_row
from .suffix_automaton import Automaton, advance, following

CHILDREN = 16
"""Most candidates that are looked at after one node."""
_SHORTEST_WEIGHT, _LONGER_WEIGHT = 0.8, 0.4
"""Of the shortest context that is known, against nothing, and of every longer one, against the shorter ones."""
_SUFFIX_WEIGHTS = np.array([0.0, 0.1, 0.15, 0.25, 0.35, 0.5, 0.6, 0.8], np.float32)
"""By the kind of match: `calibration.match_kind`."""


class Growth(NamedTuple):
    """The nodes of one growing tree, in order of growth, and what was thought of their children."""

    tokens: np.ndarray
    """(capacity,) int64."""
    parents: np.ndarray
    """(capacity,) int64."""
    ranks: np.ndarray
    """(capacity,) int64: place among the parent's candidates."""
    depths: np.ndarray
    """(capacity,) int64."""
    values: np.ndarray
    """(capacity,) float32: probability that the node is accepted."""
    contexts: np.ndarray
    """(capacity, orders) int64: the last tokens, the newest first."""
    matches: np.ndarray
    """(capacity, 2) int64: state and length of the match with the text."""
    candidates: np.ndarray
    """(capacity, CHILDREN) int64: what may follow, the likeliest first."""
    chances: np.ndarray
    """(capacity, CHILDREN) float32: calibrated probability of each."""
    cells: np.ndarray
    """(capacity, CHILDREN) int64: which kind of candidate each is, for the calibration."""
    known: np.ndarray
    """(capacity,) int64: number of candidates."""
    drafted: np.ndarray
    """(capacity,) int64: how many of them became children."""

    @classmethod
    def empty(cls, nodes: int, orders: int) -> Growth:
        """Room for so many nodes, the root included."""
        ints = {
            name: np.zeros(nodes, np.int64) for name in ("tokens", "parents", "ranks", "depths", "known", "drafted")
        }
        return cls(
            **ints,
            values=np.zeros(nodes, np.float32),
            contexts=np.full((nodes, orders), -1, np.int64),
            matches=np.zeros((nodes, 2), np.int64),
            candidates=np.zeros((nodes, CHILDREN), np.int64),
            chances=np.zeros((nodes, CHILDREN), np.float32),
            cells=np.zeros((nodes, CHILDREN), np.int64),
        )


@njit(cache=True)
def _mix(tokens: np.ndarray, shares: np.ndarray, found: int, token: int, share: float) -> int:
    """Adds a share to a token of the mixture; returns the number of tokens."""
    for place in range(found):
        if tokens[place] == token:
            shares[place] += share
            return found
    tokens[found], shares[found] = token, share
    return found + 1


@njit(cache=True)
def _consider(
    growth: Growth, node: int, rows: Rows, vocab_size: int, automaton: Automaton, suffix: bool, calibration: np.ndarray
) -> None:
    """Finds what may follow a node, and how likely."""
    k, context = rows.candidates.shape[1], growth.contexts[node]
    tokens, shares = np.empty(len(context) * k + 1, np.int64), np.empty(len(context) * k + 1, np.float32)
    found = 0
    for order in range(1, len(context) + 1):
        row = find_row(rows, vocab_size, context, order)
        if row < 0:
            continue
        weight = _LONGER_WEIGHT if found else _SHORTEST_WEIGHT
        shares[:found] *= 1 - weight
        for place in range(k):
            if not rows.shares[row, place]:
                break
            share = weight * rows.shares[row, place] / FULL
            found = _mix(tokens, shares, found, rows.candidates[row, place], share)
    followed, step = -1, 0
    if suffix and growth.matches[node, 1]:
        followed, step = following(automaton, growth.matches[node, 0]), match_kind(growth.matches[node, 1])
        if followed >= 0:
            shares[:found] *= 1 - _SUFFIX_WEIGHTS[step]
            found = _mix(tokens, shares, found, followed, _SUFFIX_WEIGHTS[step])
    best = np.argsort(-shares[:found], kind="mergesort")
    known = min(found, CHILDREN)
    for rank in range(known):
        token, share = tokens[best[rank]], shares[best[rank]]
        cell = cell_of(share, rank, step if token == followed else 0)
        likely = chance(calibration, cell, share)
        place = rank
        while place > 0 and growth.chances[node, place - 1] < likely:
            growth.candidates[node, place] = growth.candidates[node, place - 1]
            growth.chances[node, place] = growth.chances[node, place - 1]
            growth.cells[node, place] = growth.cells[node, place - 1]
            place -= 1
        growth.candidates[node, place], growth.chances[node, place], growth.cells[node, place] = token, likely, cell
    growth.known[node], growth.drafted[node] = known, 0


@njit(cache=True)
def _add(growth: Growth, node: int, parent: int, rank: int, automaton: Automaton, suffix: bool) -> None:
    """Makes the candidate of that rank a child, the newest node."""
    token = growth.candidates[parent, rank]
    growth.tokens[node], growth.parents[node], growth.ranks[node] = token, parent, rank
    growth.depths[node] = growth.depths[parent] + 1
    growth.values[node] = growth.values[parent] * growth.chances[parent, rank]
    growth.contexts[node, 0] = token
    for place in range(1, growth.contexts.shape[1]):
        growth.contexts[node, place] = growth.contexts[parent, place - 1]
    if suffix:
        state, length = advance(automaton, growth.matches[parent, 0], growth.matches[parent, 1], token)
        growth.matches[node, 0], growth.matches[node, 1] = state, length
    growth.drafted[parent] = max(growth.drafted[parent], rank + 1)


@njit(cache=True)
def _start(growth: Growth, context: np.ndarray, automaton: Automaton) -> None:
    growth.tokens[0], growth.parents[0], growth.ranks[0], growth.depths[0], growth.values[0] = context[0], -1, 0, 0, 1
    growth.contexts[0] = context
    state = automaton.counts[3]
    growth.matches[0, 0], growth.matches[0, 1] = state, automaton.length[state]


@njit(cache=True)
def grow(
    growth: Growth,
    context: np.ndarray,
    rows: Rows,
    vocab_size: int,
    automaton: Automaton,
    suffix: bool,
    calibration: np.ndarray,
    costs: np.ndarray,
    nodes: int,
    depth: int,
) -> int:
    """Grows a tree after `context` (orders,), the newest token first; returns the number of nodes, the root included.

    `costs` (nodes + 1,) holds the time of a forward pass over 1, 2, ... nodes, in any unit: the tree has as many as
    bring the most expected tokens per time. If it is empty the tree has `nodes` nodes besides the root, as far as there
    are candidates. No node stands deeper than `depth`.
    """
    _start(growth, context, automaton)
    _consider(growth, 0, rows, vocab_size, automaton, suffix, calibration)
    made, best_count, expected, best_rate = 1, 1, 1.0, 0.0
    if len(costs):
        best_rate = 1 / costs[0]
    while made <= nodes:
        parent, value = -1, np.float32(0.0)
        for node in range(made):
            place = growth.drafted[node]
            if place < growth.known[node] and growth.depths[node] < depth:
                its = growth.values[node] * growth.chances[node, place]
                if its > value:
                    parent, value = node, its
        if parent < 0:
            break
        if len(costs) and not _may_pay(costs, made, expected, value, best_rate):
            break
        _add(growth, made, parent, growth.drafted[parent], automaton, suffix)
        _consider(growth, made, rows, vocab_size, automaton, suffix, calibration)
        made += 1
        expected += value
        if not len(costs):
            best_count = made
        elif expected / costs[made - 1] > best_rate:
            best_rate, best_count = expected / costs[made - 1], made
    return best_count


@njit(cache=True)
def _may_pay(costs: np.ndarray, made: int, expected: float, value: float, best_rate: float) -> bool:
    """Whether any larger tree could be better: no further node gains more than `value`."""
    for more in range(1, len(costs) - made + 1):  # noqa: SIM110 (numba compiles no generators)
        if expected + more * value > best_rate * costs[made + more - 1]:
            return True
    return False


@njit(cache=True)
def fill(
    growth: Growth,
    context: np.ndarray,
    rows: Rows,
    vocab_size: int,
    automaton: Automaton,
    suffix: bool,
    calibration: np.ndarray,
    parents: np.ndarray,
    ranks: np.ndarray,
    depth: int,
) -> int:
    """Fills a template instead: each node is the candidate of its rank after its parent. Nodes without such a candidate
    are left out with all below them. Arguments as for `grow`; returns the number of nodes.
    """
    _start(growth, context, automaton)
    places = np.full(len(parents), -1, np.int64)
    places[0] = 0
    made = 0
    for node in range(len(parents)):
        if node:
            parent = places[parents[node]]
            if parent < 0 or ranks[node] >= growth.known[parent] or growth.depths[parent] >= depth:
                continue
            _add(growth, made, parent, ranks[node], automaton, suffix)
            places[node] = made
        _consider(growth, made, rows, vocab_size, automaton, suffix, calibration)
        made += 1
    return made


@njit(cache=True)
def count_chosen(growth: Growth, nodes: int, chosen: np.ndarray, calibration: np.ndarray) -> None:
    """Counts what followed the root and, as far as they are among the first `nodes` nodes, those that became text:
    `chosen` are the tokens of the text after the root.
    """
    node = 0
    for token in chosen:
        for rank in range(growth.known[node]):
            count(calibration, growth.cells[node, rank], growth.candidates[node, rank] == token)
        parent, node = node, -1
        for child in range(parent + 1, nodes):
            if growth.parents[child] == parent and growth.tokens[child] == token:
                node = child
                break
        if node < 0:
            return


@njit(cache=True)
def contexts_below(context: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """(n, orders) int64: the last tokens at each node of a tree, newest first; `context` (orders,) are the root's."""
    contexts = np.empty((len(parents), len(context)), np.int64)
    contexts[0] = context
    for node in range(1, len(parents)):
        contexts[node, 0] = tokens[node]
        contexts[node, 1:] = contexts[parents[node], :-1]
    return contexts
