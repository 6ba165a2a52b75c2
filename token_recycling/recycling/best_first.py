"""Trees grown best first: at each step the nodes most likely to be accepted, as many as pay.

What may follow a node, and how likely, is what all that is known of its last tokens says (`mixture`).

A node's value is the product of these probabilities from the root, and its gain in expected tokens (Sequoia,
2402.12374, section 4.1; here for every step anew, as in EAGLE-2). Gains fall in the order of growth, so that the tree
ends where no further nodes can raise the expected tokens per time (`costs.budget`).

Cost per step: some microseconds a node, in compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part
from ..costs.budget import may_pay, payoff_of_root, with_node
from ..trees.tree import Tree
from .calibration import count
from .mixture import Mixture, Sources, mix
from .occurrences import LONGEST

CHILDREN = 16
"""Most candidates that are looked at after one node."""


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
    recent: np.ndarray
    """(LONGEST,) int64: the last tokens up to the root, the newest first."""
    candidates: np.ndarray
    """(capacity, CHILDREN) int64: what may follow, the likeliest first."""
    chances: np.ndarray
    """(capacity, CHILDREN) float32: how likely each is."""
    cells: np.ndarray
    """(capacity, CHILDREN) int64: which kind of candidate each is, for the calibration."""
    known: np.ndarray
    """(capacity,) int64: number of candidates."""
    drafted: np.ndarray
    """(capacity,) int64: how many of them became children."""
    mixture: Mixture
    """For one node at a time."""

    @classmethod
    def empty(cls, nodes: int, orders: int, k: int) -> GrowingTree:
        """A capacity of `nodes` nodes, the root included; for rows of `orders` and k."""
        ints = {
            name: np.zeros(nodes, np.int64) for name in ("tokens", "parents", "ranks", "depths", "known", "drafted")
        }
        return cls(
            **ints,
            values=np.zeros(nodes, np.float32),
            recent=np.full(LONGEST, -1, np.int64),
            candidates=np.zeros((nodes, CHILDREN), np.int64),
            chances=np.zeros((nodes, CHILDREN), np.float32),
            cells=np.zeros((nodes, CHILDREN), np.int64),
            mixture=Mixture.empty(orders, k),
        )


@compiled
def grow(growing: GrowingTree, recent: np.ndarray, sources: Sources, limits: Limits) -> int:
    """Grows a tree after `recent` (LONGEST,), the newest token first; returns the number of nodes with the root."""
    costs, made = limits.costs, plant(growing, recent, sources)
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
        add(growing, made, parent, growing.drafted[parent], sources)
        made += 1
        payoff = with_node(costs, payoff, made, value)
    return payoff.best_nodes


@compiled
def fill(growing: GrowingTree, recent: np.ndarray, sources: Sources, template: TemplateArrays, depth: int) -> int:
    """Fills a template instead: each node is the candidate of its rank after its parent. Nodes without such a
    candidate, and nodes deeper than `depth`, are left out with all below them. Returns as `grow`.
    """
    made = plant(growing, recent, sources)
    places = np.empty(len(template.parents), np.int64)
    places[0] = 0
    for node in range(1, len(places)):
        parent, rank = places[template.parents[node]], template.ranks[node]
        if parent < 0 or rank >= growing.known[parent] or growing.depths[parent] >= depth:
            places[node] = -1
            continue
        add(growing, made, parent, rank, sources)
        places[node] = made
        made += 1
    return made


@compiled_part
def plant(growing: GrowingTree, recent: np.ndarray, sources: Sources) -> int:
    """Makes the root; returns the number of nodes."""
    growing.tokens[0], growing.parents[0], growing.ranks[0] = recent[0], -1, 0
    growing.depths[0], growing.values[0] = 0, 1
    for place in range(LONGEST):
        growing.recent[place] = recent[place]
    consider(growing, np.int64(0), sources)
    return np.int64(1)


@compiled_part
def add(growing: GrowingTree, node: int, parent: int, rank: int, sources: Sources) -> None:
    """Makes the candidate of that rank a child, the newest node, and finds what may follow it."""
    attach(growing, node, parent, rank)
    consider(growing, node, sources)


@compiled_part
def attach(growing: GrowingTree, node: int, parent: int, rank: int) -> None:
    """Makes the candidate of that rank a child, the newest node."""
    growing.tokens[node], growing.parents[node] = growing.candidates[parent, rank], parent
    growing.ranks[node] = rank
    growing.depths[node] = growing.depths[parent] + 1
    growing.values[node] = growing.values[parent] * growing.chances[parent, rank]
    growing.drafted[parent] = max(growing.drafted[parent], rank + 1)


@compiled_part
def consider(growing: GrowingTree, node: int, sources: Sources) -> None:
    """Finds what may follow a node, the likeliest first."""
    mixture, known, depth, above = growing.mixture, np.int64(0), growing.depths[node], node
    for place in range(LONGEST):
        if place < depth:
            mixture.recent[place], above = growing.tokens[above], growing.parents[above]
        else:
            mixture.recent[place] = growing.recent[place - depth]
    for candidate in range(mix(mixture, sources)):
        likely, place = mixture.chances[candidate], known
        while place > 0 and growing.chances[node, place - 1] < likely:
            if place < CHILDREN:
                growing.candidates[node, place] = growing.candidates[node, place - 1]
                growing.chances[node, place] = growing.chances[node, place - 1]
                growing.cells[node, place] = growing.cells[node, place - 1]
            place -= 1
        if place < CHILDREN:
            growing.candidates[node, place], growing.chances[node, place] = mixture.tokens[candidate], likely
            growing.cells[node, place] = mixture.cells[candidate]
            known = min(known + 1, np.int64(CHILDREN))
    growing.known[node], growing.drafted[node] = known, 0


@compiled
def count_chosen(growing: GrowingTree, nodes: int, chosen: np.ndarray, calibration: np.ndarray) -> None:
    """Counts which kinds of candidates were right, at the root and at those of the first `nodes` nodes that became
    text: `chosen` are the tokens of the text after the root.
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
