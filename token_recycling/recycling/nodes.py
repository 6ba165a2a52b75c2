"""Nodes of a growing draft, each with its candidates, most probable first (`mixture`).

Cost: two microseconds per node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled_part
from .copying import HYPOTHESES, find, go_on
from .mixture import Mixture, Sources, mix
from .ngrams import ABSENT
from .suffix_index import LONGEST

CHILDREN = 16
"""Most candidates of one node."""


class GrowingTree(NamedTuple):
    """Nodes of a tree in order of growth, with their candidates; with slots as first dimension for many sequences."""

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray  # (capacity,) int64 each
    ranks: np.ndarray  # (capacity,) int64: rank among the parent's candidates
    values: np.ndarray  # (capacity,) float32: probability that the node is accepted
    recent: np.ndarray  # (LONGEST,) int64: the last tokens up to the root, newest first
    candidates: np.ndarray  # (capacity, CHILDREN) int64: candidates, most probable first
    probabilities: np.ndarray  # (capacity, CHILDREN) float32: their probabilities
    cells: np.ndarray  # (capacity, CHILDREN) int64: kinds, as the calibration has them
    known: np.ndarray  # (capacity,) int64: number of candidates
    drafted: np.ndarray  # (capacity,) int64: how many of them became children
    places: np.ndarray  # (capacity, HYPOTHESES, 4) int64: where copying may continue
    mixture: Mixture

    @classmethod
    def empty(cls, slots: int, nodes: int, orders: int, k: int) -> GrowingTree:
        """Allocate `slots` sequences of `nodes` nodes each, the root included; for rows of `orders` and k."""
        ints = ("tokens", "parents", "depths", "ranks", "known", "drafted")
        return cls(
            **{name: np.zeros((slots, nodes), np.int64) for name in ints},
            values=np.zeros((slots, nodes), np.float32),
            recent=np.full((slots, LONGEST), ABSENT, np.int64),
            candidates=np.zeros((slots, nodes, CHILDREN), np.int64),
            probabilities=np.zeros((slots, nodes, CHILDREN), np.float32),
            cells=np.zeros((slots, nodes, CHILDREN), np.int64),
            places=np.full((slots, nodes, HYPOTHESES, 4), -1, np.int64),
            mixture=Mixture.empty(orders, k),
        )


@compiled_part(allocates=True)
def tree_of(trees: GrowingTree, slot: int) -> GrowingTree:
    """Return the nodes of one sequence, as views."""
    return GrowingTree(
        trees.tokens[slot],
        trees.parents[slot],
        trees.depths[slot],
        trees.ranks[slot],
        trees.values[slot],
        trees.recent[slot],
        trees.candidates[slot],
        trees.probabilities[slot],
        trees.cells[slot],
        trees.known[slot],
        trees.drafted[slot],
        trees.places[slot],
        trees.mixture,
    )


@compiled_part
def attach(tree: GrowingTree, node: int, parent: int, rank: int, sources: Sources) -> None:
    """Make the candidate of that rank a child: the newest node."""
    put_below(tree, node, parent, tree.candidates[parent, rank], tree.probabilities[parent, rank], sources)
    tree.ranks[node], tree.drafted[parent] = rank, max(tree.drafted[parent], rank + 1)


@compiled_part
def put_below(tree: GrowingTree, node: int, parent: int, token: int, probability: float, sources: Sources) -> None:
    """Add a token below a node, as the newest node."""
    tree.tokens[node], tree.parents[node], tree.depths[node] = token, parent, tree.depths[parent] + 1
    tree.values[node] = tree.values[parent] * probability
    go_on(sources.copying, sources.sequence, tree.places[parent], tree.tokens[node], tree.places[node])


@compiled_part
def consider(tree: GrowingTree, node: int, sources: Sources) -> None:
    """Find the candidates after the newest node."""
    mixture, known, depth, above = tree.mixture, np.int64(0), tree.depths[node], node
    for place in range(LONGEST):
        if place < depth:
            mixture.recent[place], above = tree.tokens[above], tree.parents[above]
        else:
            mixture.recent[place] = tree.recent[place - depth]
    for candidate in range(mix(mixture, sources, tree.places[node])):
        probability, place = mixture.probabilities[candidate], known
        while place > 0 and tree.probabilities[node, place - 1] < probability:
            if place < CHILDREN:
                tree.candidates[node, place] = tree.candidates[node, place - 1]
                tree.probabilities[node, place] = tree.probabilities[node, place - 1]
                tree.cells[node, place] = tree.cells[node, place - 1]
            place -= 1
        if place < CHILDREN:
            tree.candidates[node, place], tree.probabilities[node, place] = mixture.tokens[candidate], probability
            tree.cells[node, place] = mixture.cells[candidate]
            known = min(known + 1, np.int64(CHILDREN))
    tree.known[node], tree.drafted[node] = known, 0
    if node == 0:
        find(sources.copying, tree.places[0], mixture.longest[0, 1], mixture.longest[0, 0])


@compiled_part
def keep_allowed(tree: GrowingTree, node: int, mask: np.ndarray) -> None:
    """Drop the candidates of a node that a grammar forbids; they do not count for the calibration either. `mask`
    (words,) int32: one bit per token, lowest first, set if the token is allowed.
    """
    known = np.int64(0)
    for rank in range(tree.known[node]):
        token = tree.candidates[node, rank]
        if token < 32 * len(mask) and mask[token >> 5] >> (token & 31) & 1:
            tree.candidates[node, known], tree.probabilities[node, known] = token, tree.probabilities[node, rank]
            tree.cells[node, known] = tree.cells[node, rank]
            known += 1
    tree.known[node] = known
