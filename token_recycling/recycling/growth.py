"""Grow trees, chains and templates for one sequence or many, best node first, in one call of compiled code.

A node's value is the product of the probabilities from the root: its expected gain in tokens (Sequoia, 2402.12374,
section 4.1; here at every step, as in EAGLE-2). Of all sequences in a batch the most valuable node is added next, until
more would not pay (`costs.budget`). A chain is a tree with one child per node. In a batch some sequences are easier to
predict than others, so the probabilities along chains are corrected per sequence by observed against expected
rejections.

A sequence has a slot: rows of shared arrays, and the addresses of its index. One call for all sequences costs 3
microseconds per sequence besides its nodes (`nodes`); separate calls would cost 12 more each, 0.4 ms in a step of 32
sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from .._util.compiled import compiled, compiled_part
from ..costs.budget import may_pay
from .calibration import count
from .copying import Copying, begin_draft, follow, follows_from
from .mixture import Sources
from .ngrams import ABSENT
from .nodes import GrowingTree, attach, consider, keep_allowed, put_below, tree_of
from .suffix_index import LONGEST, IndexArrays, append_one

_PRIOR, _OF_TEXT, _OF_ALL = 2.0, 0.9, 0.99
"""Prior in verified tokens of a new sequence; decay per step of one sequence, and of all."""


class SequenceArrays(NamedTuple):
    """Per-sequence state for compiled functions; s slots."""

    trees: GrowingTree
    made: np.ndarray  # (s,) int64: nodes of a tree; 0 once its outcome was counted
    read: np.ndarray  # (s,) int64: tokens read
    wrong: np.ndarray
    """(s + 1, 3) float64: recently verified draft tokens, rejected ones, expected rejections; the last row: all
    sequences.
    """
    addresses: np.ndarray  # (s, 4) int64: of the arrays of an index
    capacities: np.ndarray  # (s,) int64: of the index; 0 where the sequence is not searched
    copying: Copying  # state of edit-aware copying

    @classmethod
    def empty(cls, slots: int, *sizes: int) -> SequenceArrays:
        """`sizes`: nodes, orders and k, as of `GrowingTree.empty`."""
        made, read, capacities = np.zeros((3, slots), np.int64)
        trees, wrong = GrowingTree.empty(slots, *sizes), np.zeros((slots + 1, 3))
        return cls(trees, made, read, wrong, np.zeros((slots, 4), np.int64), capacities, Copying.empty(slots))


class Asked(NamedTuple):
    """The n sequences of a step, in any order."""

    tokens: np.ndarray  # (rows, longest) integers: a sequence per row
    rows: np.ndarray  # (n,) int64: the row of each sequence
    slots: np.ndarray  # (n,) int64
    lengths: np.ndarray  # (n,) int64: tokens
    max_depths: np.ndarray  # (n,) int64: depth limit of nodes
    learns: bool  # whether the calibration shared by all sequences counts outcomes


class Shape(NamedTuple):
    """The allowed shapes of drafts."""

    parents: np.ndarray
    """(n,) int64: parents of a template's nodes, each filled with the candidate of its rank; empty where trees grow."""
    ranks: np.ndarray  # (n,) int64
    nodes: int  # per sequence at most, without the root
    children: int  # per node at most; 1 for chains
    corrected: bool  # whether probabilities along chains are corrected per sequence


def _pointers(dtype: Any) -> Any:
    """Return a function for compiled code that turns an address into a pointer to numbers of that type."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(address), cast

    return pointer


_int32s, _int64s = _pointers(types.int32), _pointers(types.int64)


@compiled_part(allocates=True)
def _sources_of(sequences: SequenceArrays, slot: int, known: Sources) -> Sources:
    """Return the shared sources with the index of a sequence."""
    capacity, addresses = sequences.capacities[slot], sequences.addresses
    index = IndexArrays(
        carray(_int32s(addresses[slot, 0]), (capacity,)),
        carray(_int32s(addresses[slot, 1]), (2, capacity)),
        carray(_int32s(addresses[slot, 2]), (2, capacity)),
        carray(_int64s(addresses[slot, 3]), (1,)),
    )
    copying = Copying(sequences.copying.state[slot], sequences.copying.rules[slot])
    return Sources(known.rows, index, known.history, known.calibration, copying)


class Following(NamedTuple):
    """The next candidate of each of n sequences."""

    parents: np.ndarray  # (n,) int64: nodes
    ranks: np.ndarray  # (n,) int64: rank among the candidates of the parent
    gains: np.ndarray  # (n,) float64: expected tokens; 0 without a candidate
    corrections: np.ndarray  # (n, 2) float64: see `_corrections`
    placed: np.ndarray  # (n, nodes of a template + 1) int64: see `_next_of_template`


@compiled
def draft(
    sequences: SequenceArrays,
    asked: Asked,
    known: Sources,
    shape: Shape,
    costs: np.ndarray,
    ratio: float,
    counts: np.ndarray,
) -> None:
    """Read the new tokens of n sequences, grow their trees, and fill `counts` (n,) int64 with the number of nodes of
    each that pay, the root included. `known.sequence` is empty. `costs` (m,) float64: time of verifying 1, 2, ... nodes
    of all sequences, in any unit; empty where every node pays. `ratio`: accepted / predicted tokens of earlier drafts,
    which scales gains.
    """
    n = len(asked.rows)
    placed = np.zeros((n, len(shape.parents) + 1), np.int64)
    following = Following(np.empty(n, np.int64), np.empty(n, np.int64), np.zeros(n), np.ones((n, 2)), placed)
    for one in range(n):
        slot = asked.slots[one]
        tree, sources = tree_of(sequences.trees, slot), _sources_of(sequences, slot, known)
        _read(sequences, asked, one, tree, sources)
        if shape.corrected:
            following.corrections[one] = _corrections(sequences.wrong, slot)
        _follow(sequences, asked, one, np.int64(0), shape, tree, sources, following)
        counts[one] = 1
    grown, kept = _grow(sequences, asked, known, shape, costs, ratio, following)
    for place in range(kept):
        counts[grown[place]] += 1


@compiled_part(allocates=True)
def _grow(
    sequences: SequenceArrays,
    asked: Asked,
    known: Sources,
    shape: Shape,
    costs: np.ndarray,
    ratio: float,
    following: Following,
) -> tuple[np.ndarray, int]:
    """Add the most valuable candidate of all sequences while more may pay. Return the sequence of each added node, and
    how many of these nodes pay.
    """
    n, most, gains = len(asked.rows), np.int64(len(asked.rows) * shape.nodes), following.gains
    if len(costs):
        most = max(np.int64(0), min(most, np.int64(len(costs)) - n))
    grown, kept, expected = np.empty(most, np.int64), np.int64(0), n / ratio  # in units of the unscaled gains
    best = expected / costs[n - 1] if most > 0 and len(costs) else 0.0
    current, tree = np.int64(0), tree_of(sequences.trees, asked.slots[0])
    sources = _sources_of(sequences, asked.slots[0], known)
    for total in range(most):
        one = np.int64(0)
        for other in range(1, n):
            if gains[other] > gains[one]:
                one = np.int64(other)
        if gains[one] <= 0 or not may_pay(costs, n + total, expected, best, gains[one]):
            break
        slot = asked.slots[one]
        if one != current:
            current, tree, sources = one, tree_of(sequences.trees, slot), _sources_of(sequences, slot, known)
        node = sequences.made[slot]
        attach(tree, node, following.parents[one], following.ranks[one], sources)
        if shape.children == 1:
            tree.values[node] = gains[one]
        expected, grown[total] = expected + gains[one], one
        rate = expected / costs[n + total] if len(costs) else 1.0
        if rate >= best:
            best, kept = rate, np.int64(total + 1)
        _follow(sequences, asked, one, node, shape, tree, sources, following)
    return grown, kept


@compiled_part
def _follow(
    sequences: SequenceArrays,
    asked: Asked,
    one: int,
    node: int,
    shape: Shape,
    tree: GrowingTree,
    sources: Sources,
    following: Following,
) -> None:
    """Find the candidates after the newest node of a sequence, and the next candidate of its tree."""
    consider(tree, node, sources)
    sequences.made[asked.slots[one]] = node + 1
    if len(shape.parents):
        found = _next_of_template(tree, node, following.placed[one], shape, asked.max_depths[one])
    else:
        found = _next(tree, node + 1, shape, asked.max_depths[one], following.corrections[one])
    following.parents[one], following.ranks[one], following.gains[one] = found


@compiled
def put(
    sequences: SequenceArrays, slot: int, known: Sources, parent: int, token: int, probability: float, mask: np.ndarray
) -> None:
    """Add a token below a node of a draft, and find its candidates within `mask` (see `keep_allowed`); none if the mask
    is empty.
    """
    tree, node, sources = tree_of(sequences.trees, slot), sequences.made[slot], _sources_of(sequences, slot, known)
    put_below(tree, node, parent, token, probability, sources)
    tree.ranks[node] = tree.drafted[parent]
    tree.drafted[parent] += 1
    tree.known[node], tree.drafted[node] = 0, 0
    if len(mask):
        consider(tree, node, sources)
        keep_allowed(tree, node, mask)
    sequences.made[slot] = node + 1


@compiled_part(allocates=True)
def _read(sequences: SequenceArrays, asked: Asked, one: int, tree: GrowingTree, sources: Sources) -> None:
    """Count the outcome of the last tree, index new tokens, and start a new tree."""
    slot, row, length = asked.slots[one], asked.rows[one], asked.lengths[one]
    read = sequences.read[slot]
    written = np.empty(length - read, np.int64)
    for place in range(len(written)):
        written[place] = asked.tokens[row, read + place]
    if sequences.made[slot]:
        if asked.learns:
            count_chosen(tree, sequences.made[slot], written, sources.calibration)
        _count_wrong(sequences, slot, tree, written)
    if len(sources.sequence.tokens):
        _append(written, read, sources)
        begin_draft(sources.copying, sources.sequence, tree.places[0])
    for place in range(LONGEST):
        tree.recent[place] = np.int64(asked.tokens[row, length - 1 - place]) if place < length else np.int64(ABSENT)
    tree.tokens[0], tree.parents[0], tree.ranks[0], tree.depths[0], tree.values[0] = tree.recent[0], -1, 0, 0, 1
    sequences.read[slot] = length


@compiled_part
def _append(written: np.ndarray, read: int, sources: Sources) -> None:
    """Index new tokens of a sequence of which `read` are indexed, and follow what they were copied from."""
    for place in range(len(written)):
        if read + place >= follows_from(sources.copying):
            follow(sources.copying, sources.sequence, written[place])
        append_one(sources.sequence, written[place])


@compiled
def read_on(sequences: SequenceArrays, slot: int, written: np.ndarray, known: Sources) -> None:
    """Read the last tokens of a sequence, after which nothing is drafted."""
    _append(written, sequences.read[slot], _sources_of(sequences, slot, known))
    sequences.read[slot] += len(written)


@compiled_part
def _next(tree: GrowingTree, made: int, shape: Shape, max_depth: int, correction: np.ndarray) -> tuple[int, int, float]:
    """Return the parent, rank and probability of the best candidate among `made` nodes; probability 0: none."""
    parent, value = np.int64(-1), np.float32(0.0)
    if made <= shape.nodes:
        for node in range(made):
            place = tree.drafted[node]
            if place < tree.known[node] and place < shape.children and tree.depths[node] < max_depth:
                its = tree.values[node] * tree.probabilities[node, place]
                if its > value:
                    parent, value = np.int64(node), its
    if parent < 0:
        return parent, np.int64(0), 0.0
    if shape.children > 1:
        return parent, tree.drafted[parent], np.float64(value)
    return parent, np.int64(0), np.float64(tree.values[parent] * _corrected(tree.probabilities[parent, 0], correction))


@compiled_part
def _next_of_template(
    tree: GrowingTree, node: int, placed: np.ndarray, shape: Shape, max_depth: int
) -> tuple[int, int, float]:
    """Return the same for a template whose newest node is `node`. Nodes without such a candidate are left out, with the
    nodes below them. `placed` (n + 1,): index of each template node in the tree, -1 where left out; the last entry
    counts handled nodes.
    """
    done = placed[-1]
    placed[done] = node
    for next_one in range(done + 1, len(shape.parents)):
        parent, rank = placed[shape.parents[next_one]], shape.ranks[next_one]
        if parent >= 0 and rank < tree.known[parent] and tree.depths[parent] < max_depth:
            placed[-1] = next_one
            return parent, rank, 1.0
        placed[next_one] = -1
    return np.int64(-1), np.int64(0), 0.0


@compiled
def count_chosen(tree: GrowingTree, nodes: int, chosen: np.ndarray, calibration: np.ndarray) -> None:
    """Count which kinds of candidates were right along `chosen`, the tokens after the root."""
    node = 0
    for token in chosen:
        for rank in range(tree.known[node]):
            count(calibration, tree.cells[node, rank], tree.candidates[node, rank] == token)
        parent, node = node, -1
        for child in range(parent + 1, nodes):
            if tree.parents[child] == parent and tree.tokens[child] == token:
                node = child
                break
        if node < 0:
            return


@compiled_part
def _count_wrong(sequences: SequenceArrays, slot: int, chain: GrowingTree, written: np.ndarray) -> None:
    """Count, per sequence and for all, verified tokens of the chain, whether one was rejected, and the expectation."""
    verified, wrong, expected = 0.0, 0.0, 0.0
    for place in range(min(len(written), sequences.made[slot] - 1)):
        verified += 1
        expected += 1 - chain.probabilities[place, 0]
        if chain.tokens[place + 1] != written[place]:
            wrong = 1.0
            break
    of_all = len(sequences.wrong) - 1
    for row, keeps in ((slot, _OF_TEXT), (of_all, _OF_ALL)):
        sequences.wrong[row, 0] = sequences.wrong[row, 0] * keeps + verified
        sequences.wrong[row, 1] = sequences.wrong[row, 1] * keeps + wrong
        sequences.wrong[row, 2] = sequences.wrong[row, 2] * keeps + expected


@compiled_part
def _corrections(wrong: np.ndarray, slot: int) -> tuple[float, float]:
    """Return observed / expected rejections of a sequence, and the same of acceptances; the prior is the average of
    all.
    """
    verified, missed, expected = wrong[len(wrong) - 1]
    all_wrong = (missed + 1) / (expected + 1)
    all_right = (verified - missed + 1) / (verified - expected + 1)
    verified, missed, expected = wrong[slot]
    return (
        (missed + _PRIOR * all_wrong) / (expected + _PRIOR),
        (verified - missed + _PRIOR * all_right) / (verified - expected + _PRIOR),
    )


@compiled_part
def _corrected(probability: float, correction: np.ndarray) -> float:
    """Return the corrected probability, the lower of two estimates. For a probability near 1 scaled rejections stay
    near 0 however many there were; there the acceptances decide.
    """
    wrong, right = correction
    return max(
        0.0, min(1 - (1 - probability) * wrong, probability * right) if wrong > 1 else 1 - (1 - probability) * wrong
    )
