"""Nodes of a growing draft, each with its candidates, most probable first (`mixture`).

Cost: two microseconds per node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled_inline, compiled_part
from .copying import HYPOTHESES, Copying, find, go_on
from .mixture import Sources, mix
from .ngrams import ABSENT
from .suffix_index import LONGEST, IndexArrays

CHILDREN = 16
"""Most candidates of one node."""


class GrowingTree(NamedTuple):
    """Nodes of a tree in order of growth, with their candidates, which a `Draft` does not have: compiled code grows the
    next node from them, and counts which were right.
    """

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

    @classmethod
    def empty(cls, nodes: int) -> GrowingTree:
        """Allocate a tree of up to `nodes` nodes, the root included."""
        ints = ("tokens", "parents", "depths", "ranks", "known", "drafted")
        return cls(
            **{name: np.zeros(nodes, np.int64) for name in ints},
            values=np.zeros(nodes, np.float32),
            recent=np.full(LONGEST, ABSENT, np.int64),
            candidates=np.zeros((nodes, CHILDREN), np.int64),
            probabilities=np.zeros((nodes, CHILDREN), np.float32),
            cells=np.zeros((nodes, CHILDREN), np.int64),
            places=np.full((nodes, HYPOTHESES, 4), ABSENT, np.int64),
        )

    def first(self, nodes: int) -> GrowingTree:
        """Return the first nodes, as views that hold until the next draft."""
        return GrowingTree(*(array if array is self.recent else array[:nodes] for array in self))


@compiled_part
def put_below(
    tree: GrowingTree, node: int, parent: int, rank: int, token: int, probability: float, copying: Copying,
    index: IndexArrays,
) -> None:  # fmt: skip
    """Add a token below a node, as the newest node, with that rank among the candidates of its parent."""
    tree.tokens[node], tree.parents[node], tree.depths[node] = token, parent, tree.depths[parent] + 1
    tree.values[node], tree.ranks[node] = tree.values[parent] * probability, rank
    if tree.drafted[parent] <= rank:
        tree.drafted[parent] = rank + 1
    tree.known[node], tree.drafted[node] = 0, 0
    go_on(copying, index, tree.places, parent, node, token)


@compiled_inline
def consider(tree: GrowingTree, node: int, sources: Sources) -> None:
    """Find the candidates after the newest node."""
    mixture, known, depth, above = sources.mixture, np.int64(0), tree.depths[node], node
    for place in range(LONGEST):
        if place < depth:
            mixture.recent[place], above = tree.tokens[above], tree.parents[above]
        else:
            mixture.recent[place] = tree.recent[place - depth]
    for candidate in range(mix(sources, tree.places, node)):
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
        find(sources.copying, tree.places, mixture.longest[0, 1], mixture.longest[0, 0])


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
