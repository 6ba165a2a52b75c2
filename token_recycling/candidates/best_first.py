"""Trees grown best first: at each step the nodes most likely to be accepted, as many as pay.

What may follow a node is known from the rows of its last one to four tokens (`ngram_matrix`) and, after a match with
the text so far, from what followed there (`suffix_automaton`). They are mixed as in an interpolated n-gram model
(Jelinek and Mercer 1980): a longer n-gram has a fixed weight against all shorter ones, the suffix a weight that rises
with the length of the match. The mixture is then calibrated (`calibration`).

A node's value is the product of these probabilities from the root, and its gain in expected tokens (Sequoia,
2402.12374, section 4.1; here for every step anew, as in EAGLE-2). Gains fall in the order of growth, so that the tree
ends where no further nodes can raise the expected tokens per time (`costs.budget`).

Cost per step: about a microsecond a node, in compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..compiled import compiled, compiled_part
from ..costs.budget import may_pay, payoff_of_root, with_node
from ..tree import Tree
from .calibration import cell_of, chance, count, match_kind
from .ngram_matrix import NgramMatrix
from .ngram_rows import FULL, Rows, find_row, sort_descending
from .suffix_automaton import AutomatonArrays, SuffixAutomaton, advance, following

CHILDREN = 16
"""Most candidates that are looked at after one node."""
_SHORTEST_WEIGHT, _LONGER_WEIGHT = 0.8, 0.4
"""Of the shortest n-gram that is known, against nothing, and of every longer one, against the shorter ones."""
_SUFFIX_WEIGHTS = np.array([0.0, 0.1, 0.15, 0.25, 0.35, 0.5, 0.6, 0.8])
"""By the kind of match: `calibration.match_kind`."""


class Sources(NamedTuple):
    """What candidates come from."""

    rows: Rows
    automaton: AutomatonArrays
    """Of the text so far; an empty one where the suffix is not to count."""
    calibration: np.ndarray

    @classmethod
    def of(cls, matrix: NgramMatrix, automaton: SuffixAutomaton) -> Sources:
        return cls(matrix.rows, automaton.arrays, matrix.calibration)


class Limits(NamedTuple):
    """How large a tree may grow."""

    costs: np.ndarray
    """(nodes + 1,) float64: the time of a forward pass over 1, 2, ... nodes, in any unit; the tree has as many nodes as
    bring the most expected tokens per time. If it is empty, as many as there are candidates for.
    """
    nodes: int
    """Most nodes besides the root."""
    depth: int
    """No node stands deeper."""


class TemplateArrays(NamedTuple):
    """A template of n nodes, for compiled functions."""

    parents: np.ndarray
    """(n,) int64; -1 for the root."""
    ranks: np.ndarray
    """(n,) int64."""

    @classmethod
    def of(cls, tree: Tree) -> TemplateArrays:
        return cls(np.array(tree.parents), np.array(tree.ranks))


class GrowingTree(NamedTuple):
    """Buffers for the nodes of one growing tree, in order of growth, and for the candidates after them."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    """(capacity,) int64 each."""
    ranks: np.ndarray
    """(capacity,) int64: place among the parent's candidates."""
    values: np.ndarray
    """(capacity,) float32: probability that the node is accepted."""
    ngrams: np.ndarray
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
    def empty(cls, nodes: int, orders: int) -> GrowingTree:
        """A capacity of `nodes` nodes, the root included."""
        ints = {
            name: np.zeros(nodes, np.int64) for name in ("tokens", "parents", "ranks", "depths", "known", "drafted")
        }
        return cls(
            **ints,
            values=np.zeros(nodes, np.float32),
            ngrams=np.full((nodes, orders), -1, np.int64),
            matches=np.zeros((nodes, 2), np.int64),
            candidates=np.zeros((nodes, CHILDREN), np.int64),
            chances=np.zeros((nodes, CHILDREN), np.float32),
            cells=np.zeros((nodes, CHILDREN), np.int64),
        )


@compiled
def grow(growing: GrowingTree, ngram: np.ndarray, sources: Sources, limits: Limits) -> int:
    """Grows a tree after `ngram` (orders,), the newest token first; returns the number of nodes, the root included."""
    costs, made = limits.costs, _plant(growing, ngram, sources)
    payoff = payoff_of_root(costs)
    while made <= limits.nodes:
        parent, value = np.int64(-1), np.float32(0.0)
        for node in range(made):
            place = growing.drafted[node]
            if place < growing.known[node] and growing.depths[node] < limits.depth:
                its = growing.values[node] * growing.chances[node, place]
                if its > value:
                    parent, value = node, its
        if parent < 0 or not may_pay(costs, payoff, made, value):
            break
        _add(growing, made, parent, growing.drafted[parent], sources)
        made += 1
        payoff = with_node(costs, payoff, made, value)
    return payoff.best_nodes


@compiled
def fill(growing: GrowingTree, ngram: np.ndarray, sources: Sources, template: TemplateArrays, depth: int) -> int:
    """Fills a template instead: each node is the candidate of its rank after its parent. Nodes without such a
    candidate, and nodes deeper than `depth`, are left out with all below them. Returns as `grow`.
    """
    made = _plant(growing, ngram, sources)
    places = np.empty(len(template.parents), np.int64)
    places[0] = 0
    for node in range(1, len(places)):
        parent, rank = places[template.parents[node]], template.ranks[node]
        if parent < 0 or rank >= growing.known[parent] or growing.depths[parent] >= depth:
            places[node] = -1
            continue
        _add(growing, made, parent, rank, sources)
        places[node] = made
        made += 1
    return made


@compiled_part(allocates=True)
def _plant(growing: GrowingTree, ngram: np.ndarray, sources: Sources) -> int:
    """Makes the root; returns the number of nodes."""
    growing.tokens[0], growing.parents[0], growing.ranks[0] = ngram[0], -1, 0
    growing.depths[0], growing.values[0] = 0, 1
    for place in range(len(ngram)):
        growing.ngrams[0, place] = ngram[place]
    state = sources.automaton.counts[3]
    growing.matches[0, 0], growing.matches[0, 1] = state, sources.automaton.length[state]
    _consider(growing, np.int64(0), sources)
    return np.int64(1)


@compiled_part(allocates=True)
def _add(growing: GrowingTree, node: int, parent: int, rank: int, sources: Sources) -> None:
    """Makes the candidate of that rank a child, the newest node."""
    token = growing.candidates[parent, rank]
    growing.tokens[node], growing.parents[node], growing.ranks[node] = token, parent, rank
    growing.depths[node] = growing.depths[parent] + 1
    growing.values[node] = growing.values[parent] * growing.chances[parent, rank]
    growing.ngrams[node, 0] = token
    for place in range(1, growing.ngrams.shape[1]):
        growing.ngrams[node, place] = growing.ngrams[parent, place - 1]
    state, length = advance(sources.automaton, growing.matches[parent, 0], growing.matches[parent, 1], token)
    growing.matches[node, 0], growing.matches[node, 1] = state, length
    growing.drafted[parent] = max(growing.drafted[parent], rank + 1)
    _consider(growing, node, sources)


@compiled_part(allocates=True)
def _consider(growing: GrowingTree, node: int, sources: Sources) -> None:
    """Finds what may follow a node, and how likely."""
    rows, automaton, calibration = sources
    k, ngram = rows.candidates.shape[1], growing.ngrams[node]
    tokens, shares = np.empty(len(ngram) * k + 1, np.int32), np.empty(len(ngram) * k + 1, np.float32)
    found = np.int64(0)
    for order in range(1, len(ngram) + 1):
        row = find_row(rows, ngram, order)
        if row < 0:
            continue
        weight = _LONGER_WEIGHT if found else _SHORTEST_WEIGHT
        for place in range(found):
            shares[place] *= 1 - weight
        for place in range(k):
            if not rows.shares[row, place]:
                break
            share = weight * rows.shares[row, place] / FULL
            found = _mix(tokens, shares, found, np.int64(rows.candidates[row, place]), share)
    followed, step = -1, 0
    if growing.matches[node, 1]:
        followed, step = following(automaton, growing.matches[node, 0]), match_kind(growing.matches[node, 1])
        if followed >= 0:
            for place in range(found):
                shares[place] *= 1 - _SUFFIX_WEIGHTS[step]
            found = _mix(tokens, shares, found, followed, _SUFFIX_WEIGHTS[step])
    sort_descending(tokens, shares, found)
    known = min(found, CHILDREN)
    for rank in range(known):
        token, share = tokens[rank], shares[rank]
        cell = cell_of(share, rank, step if token == followed else 0)
        likely = chance(calibration, cell, share)
        place = rank
        while place > 0 and growing.chances[node, place - 1] < likely:
            growing.candidates[node, place] = growing.candidates[node, place - 1]
            growing.chances[node, place] = growing.chances[node, place - 1]
            growing.cells[node, place] = growing.cells[node, place - 1]
            place -= 1
        growing.candidates[node, place] = token
        growing.chances[node, place], growing.cells[node, place] = likely, cell
    growing.known[node], growing.drafted[node] = known, 0


@compiled_part
def _mix(tokens: np.ndarray, shares: np.ndarray, found: int, token: int, share: float) -> int:
    """Adds a share to a token of the mixture; returns the number of tokens."""
    for place in range(found):
        if tokens[place] == token:
            shares[place] += share
            return found
    tokens[found], shares[found] = token, share
    return found + 1


@compiled
def count_chosen(growing: GrowingTree, nodes: int, chosen: np.ndarray, calibration: np.ndarray) -> None:
    """Counts what followed the root and, as far as they are among the first `nodes` nodes, those that became text:
    `chosen` are the tokens of the text after the root.
    """
    node = 0
    for token in chosen:
        for rank in range(growing.known[node]):
            count(calibration, growing.cells[node, rank], growing.candidates[node, rank] == token)
        parent, node = node, -1
        for child in range(parent + 1, nodes):
            if growing.parents[child] == parent and growing.tokens[child] == token:
                node = child
                break
        if node < 0:
            return
