"""Grow the draft of one sequence, most valuable node first, in compiled code.

A node's value is the product of the probabilities from the root: its expected gain in tokens (Sequoia, 2402.12374,
section 4.1; here at every step, as in EAGLE-2). The most valuable node is added next, until more would not pay
(`costs.budget`). A chain is a tree with one child per node; a template is filled with the candidates of its ranks.

In a batch some sequences are easier to predict than others, so the probabilities along chains are corrected per
sequence by observed against expected rejections. Cost: two microseconds per node (`nodes`), a few per call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part
from ..costs.budget import may_pay
from .calibration import count
from .copying import Copying, begin_draft, follow, follows_from
from .mixture import Mixture, Sources
from .ngrams import Rows
from .nodes import GrowingTree, consider, keep_allowed, put_below
from .suffix_index import IndexArrays, append_one

_PRIOR, _OF_SEQUENCE, _OF_ALL = 2.0, 0.9, 0.99
"""Prior in verified tokens of a new sequence; decay per step of one sequence, and of all."""


class Shape(NamedTuple):
    """The allowed shapes of a sequence's drafts."""

    parents: np.ndarray
    """(n,) int64: parents of a template's nodes, each filled with the candidate of its rank; empty where trees grow."""
    ranks: np.ndarray  # (n,) int64
    filled: np.ndarray  # (n + 1,) int64: workspace, see `_next_of_template`
    nodes: int  # at most, without the root
    children: int  # per node at most; 1 for chains
    corrected: bool  # whether probabilities along chains are corrected
    counted: bool  # whether outcomes are counted in the calibration


@compiled(allocates=False)
def advance(
    tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, ranks: np.ndarray, values: np.ndarray,
    recent: np.ndarray, candidates: np.ndarray, probabilities: np.ndarray, cells: np.ndarray, known: np.ndarray,
    drafted: np.ndarray, places: np.ndarray,
    orders: int, mixed_recent: np.ndarray, alternative: np.ndarray, mixed_tokens: np.ndarray, shares: np.ndarray,
    matches: np.ndarray, copied: np.ndarray, mixed_cells: np.ndarray, mixed_probabilities: np.ndarray,
    match_places: np.ndarray, lengths: np.ndarray, longest: np.ndarray,
    row_candidates: np.ndarray, row_shares: np.ndarray, row_keys: np.ndarray,
    index_tokens: np.ndarray, index_before: np.ndarray, index_newest: np.ndarray, index_added: np.ndarray,
    history_tokens: np.ndarray, history_before: np.ndarray, history_newest: np.ndarray, history_added: np.ndarray,
    calibration: np.ndarray, copying_state: np.ndarray, copying_rules: np.ndarray,
    template_parents: np.ndarray, template_ranks: np.ndarray, filled: np.ndarray, most: int, children: int,
    corrected: bool, counted: bool, rejections: np.ndarray, all_rejections: np.ndarray,
    written: np.ndarray, outcome_of: int, indexed: int, grown: int, max_depth: int, least: float, costs: np.ndarray,
    ratio: float, parent: int, token: int, probability: float, mask: np.ndarray,
) -> tuple[int, int, float]:  # fmt: skip
    """Count the outcome of the last draft, read what was written since, and draft: all that a sequence computes in a
    step. Return how many nodes pay, the root included, how many have grown, and the gain of the best candidate that was
    not added; 0 without one.

    This is one function, since numba compiles all that it calls again for each function that is called from Python. The
    arrays are those of a `GrowingTree`, `Mixture`, `Rows`, two `IndexArrays`, the calibration, a `Copying` and a
    `Shape`, one by one: numba takes six microseconds more for tuples of them. They stay the same from step to step.

    `written` (n,) int64: tokens since the last draft, of whose `outcome_of` nodes they tell the outcome (0: it was
    counted); from number `indexed` of the index on they are read (-1: not at all).

    Nodes are added to a draft of `grown` nodes, 0 for a new one, while more may pay; none is deeper than `max_depth`
    (-1: no draft), none gains `least` or less. `costs` (m,) float64: time of verifying 1, 2, ... nodes, in any unit;
    empty where every node pays. `ratio`: accepted / predicted tokens of earlier drafts, which scales gains.

    With a `parent`, only `token` is added below it, with that probability, and its candidates within `mask` (see
    `keep_allowed`) are found, none if the mask is empty.
    """
    tree = GrowingTree(
        tokens, parents, depths, ranks, values, recent, candidates, probabilities, cells, known, drafted, places
    )
    index = IndexArrays(index_tokens, index_before, index_newest, index_added)
    copying = Copying(copying_state, copying_rules)
    sources = Sources(
        Rows(row_candidates, row_shares, row_keys),
        index,
        IndexArrays(history_tokens, history_before, history_newest, history_added),
        calibration,
        copying,
        Mixture(
            orders, mixed_recent, alternative, mixed_tokens, shares, matches, copied, mixed_cells, mixed_probabilities,
            match_places, lengths, longest,
        ),
    )  # fmt: skip
    shape = Shape(template_parents, template_ranks, filled, most, children, corrected, counted)
    if outcome_of and counted:
        _count_chosen(tree, outcome_of, written, calibration)
    if outcome_of and corrected:
        _count_rejections(tree, outcome_of, written, rejections, all_rejections)
    if indexed >= 0:
        _read(index, copying, written, indexed)
    if max_depth < 0:
        return 0, 0, 0.0
    if parent >= 0:
        put_below(tree, grown, parent, tree.drafted[parent], token, np.float32(probability), copying, index)
        if not len(mask):
            return 0, grown + 1, 0.0
    elif grown == 0:
        _shift(tree.recent, written)
        tree.tokens[0], tree.parents[0], tree.ranks[0], tree.depths[0], tree.values[0] = tree.recent[0], -1, 0, 0, 1
        shape.filled[len(shape.parents)] = 0
        if len(index.tokens):
            begin_draft(copying, index, tree.places)
    correction = _corrections(rejections, all_rejections) if corrected else (1.0, 1.0)
    paying, gain, expected, rate = max(grown, 1), 0.0, 1 / ratio, 0.0  # in units of the unscaled gains
    added = grown == 0 or parent >= 0
    while True:
        if added:
            consider(tree, grown, sources)
            grown, expected = grown + 1, expected + gain
            if parent >= 0:
                keep_allowed(tree, grown - 1, mask)
                return 0, grown, 0.0
            if not len(costs):
                paying = grown
            elif expected / costs[grown - 1] >= rate:
                paying, rate = grown, expected / costs[grown - 1]
        if grown > most:
            return paying, grown, 0.0
        if len(shape.parents):
            parent_of_next, rank, gain = _next_of_template(tree, grown - 1, shape, max_depth)
        else:
            parent_of_next, rank, gain = _next(tree, grown, shape, max_depth, correction)
        if gain <= least or not may_pay(costs, grown, expected, rate, gain):
            return paying, grown, gain
        token, probability = tree.candidates[parent_of_next, rank], tree.probabilities[parent_of_next, rank]
        put_below(tree, grown, parent_of_next, rank, token, np.float32(probability), copying, index)
        if shape.children == 1:
            tree.values[grown] = gain
        added = True


@compiled_part
def _read(index: IndexArrays, copying: Copying, tokens: np.ndarray, indexed: int) -> None:
    """Index new tokens (n,) int64 of a sequence of which `indexed` are indexed, and follow what they were copied
    from.
    """
    for place in range(len(tokens)):
        if indexed + place >= follows_from(copying):
            follow(copying, index, tokens[place])
        append_one(index, tokens[place])


@compiled_part
def _shift(recent: np.ndarray, written: np.ndarray) -> None:
    """Put new tokens (n,) int64 in front of the recent ones (LONGEST,) int64, newest first."""
    count = len(written)
    for place in range(len(recent) - 1, -1, -1):
        recent[place] = written[count - 1 - place] if place < count else recent[place - count]


@compiled_part
def _next(
    tree: GrowingTree, grown: int, shape: Shape, max_depth: int, correction: tuple[float, float]
) -> tuple[int, int, float]:
    """Return the parent, rank and probability of the best candidate among `grown` nodes; probability 0: none."""
    parent, best = np.int64(-1), np.float32(0.0)
    for node in range(grown):
        rank = tree.drafted[node]
        if rank < tree.known[node] and rank < shape.children and tree.depths[node] < max_depth:
            value = tree.values[node] * tree.probabilities[node, rank]
            if value > best:
                parent, best = np.int64(node), value
    if parent < 0:
        return parent, np.int64(0), 0.0
    if shape.children > 1:
        return parent, tree.drafted[parent], np.float64(best)
    return parent, np.int64(0), np.float64(tree.values[parent] * _corrected(tree.probabilities[parent, 0], correction))


@compiled_part
def _next_of_template(tree: GrowingTree, newest: int, shape: Shape, max_depth: int) -> tuple[int, int, float]:
    """Return the same for a template whose newest node is `newest`. Nodes without such a candidate are left out, with
    the nodes below them. `shape.filled` holds the node of each node of the template, -1 where it was left out; its last
    entry counts handled nodes.
    """
    filled, last = shape.filled, len(shape.parents)
    filled[filled[last]] = newest
    for place in range(filled[last] + 1, last):
        parent, rank = filled[shape.parents[place]], shape.ranks[place]
        if parent >= 0 and rank < tree.known[parent] and tree.depths[parent] < max_depth:
            filled[last] = place
            return parent, rank, 1.0
        filled[place] = -1
    return np.int64(-1), np.int64(0), 0.0


@compiled_part
def _count_chosen(tree: GrowingTree, nodes: int, chosen: np.ndarray, calibration: np.ndarray) -> None:
    """Count which kinds of candidates were right along `chosen`, the tokens after the root of a draft of `nodes`
    nodes.
    """
    node = 0
    for place in range(len(chosen)):
        token = chosen[place]
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
def _count_rejections(
    tree: GrowingTree, nodes: int, chosen: np.ndarray, rejections: np.ndarray, all_rejections: np.ndarray
) -> None:
    """Count the verified tokens of a chain of `nodes` nodes, whether one was rejected, and the expectation, where
    `chosen` are the tokens after the root: (3,) float64 each, of its sequence and of all.
    """
    verified, rejected, expected = 0.0, 0.0, 0.0
    for place in range(min(len(chosen), nodes - 1)):
        verified += 1
        expected += 1 - tree.probabilities[place, 0]
        if tree.tokens[place + 1] != chosen[place]:
            rejected = 1.0
            break
    _decay_and_add(rejections, _OF_SEQUENCE, verified, rejected, expected)
    _decay_and_add(all_rejections, _OF_ALL, verified, rejected, expected)


@compiled_part
def _decay_and_add(counts: np.ndarray, decay: float, verified: float, rejected: float, expected: float) -> None:
    counts[0] = counts[0] * decay + verified
    counts[1] = counts[1] * decay + rejected
    counts[2] = counts[2] * decay + expected


@compiled_part
def _corrections(rejections: np.ndarray, all_rejections: np.ndarray) -> tuple[float, float]:
    """Return observed / expected rejections of a sequence, and the same of acceptances; the prior is the average of
    all.
    """
    verified, rejected, expected = all_rejections[0], all_rejections[1], all_rejections[2]
    all_wrong = (rejected + 1) / (expected + 1)
    all_right = (verified - rejected + 1) / (verified - expected + 1)
    verified, rejected, expected = rejections[0], rejections[1], rejections[2]
    return (
        (rejected + _PRIOR * all_wrong) / (expected + _PRIOR),
        (verified - rejected + _PRIOR * all_right) / (verified - expected + _PRIOR),
    )


@compiled_part
def _corrected(probability: float, correction: tuple[float, float]) -> float:
    """Return the corrected probability, the lower of two estimates. For a probability near 1 scaled rejections stay
    near 0 however many there were; there the acceptances decide.
    """
    wrong, right = correction
    return max(
        0.0, min(1 - (1 - probability) * wrong, probability * right) if wrong > 1 else 1 - (1 - probability) * wrong
    )
