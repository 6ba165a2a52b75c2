"""Grow the draft of one sequence in compiled code: nodes with their candidates, most valuable node first.

A node's value is the product of the probabilities from the root: its expected gain in tokens (Sequoia, 2402.12374,
section 4.1; here at every step, as in EAGLE-2). The most valuable node is added next, until more would not pay
(`costs`). A chain is a tree with one child per node; a template is filled with the candidates of its ranks.

In a batch some sequences are easier to predict than others, so the probabilities along chains are corrected per
sequence by observed against expected rejections. Cost: two microseconds per node, a few per call.
"""

from __future__ import annotations

import numpy as np

from .._util.compiled import compiled, compiled_inline, compiled_part
from ..costs import may_pay
from .calibration import OUTCOMES, count
from .copying import COPY, COPYING, HYPOTHESES, Record, begin_draft, find, follow, go_on
from .mixture import Mixture, Sources, mix
from .ngrams import ABSENT, Rows
from .suffix_index import LONGEST, IndexArrays, append_one

_PRIOR, _OF_SEQUENCE, _OF_ALL = 2.0, 0.9, 0.99
"""Prior in verified tokens of a new sequence; decay per step of one sequence, and of all."""

CHILDREN = 16
"""Most candidates of one node."""
NODE = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),
        ("depth", np.int64),
        ("rank", np.int64),  # among the parent's candidates
        ("value", np.float32),  # probability that the node is accepted
        ("known", np.int64),  # number of candidates
        ("drafted", np.int64),  # how many of them became children
        ("candidates", np.int64, (CHILDREN,)),  # most probable first
        ("probabilities", np.float32, (CHILDREN,)),
        ("cells", np.int64, (CHILDREN,)),  # kinds, as the calibration has them
        ("copies", COPY, (HYPOTHESES,)),  # where copying may continue
    ],
    align=True,
)
"""A node in order of growth. A `Draft` has no candidates; here the next node is grown from them, and after the step it
is counted which were right.
"""
SEQUENCE = np.dtype(
    [
        ("recent", np.int64, (LONGEST,)),  # the last tokens, newest first
        ("outcomes", OUTCOMES),
        ("copying", COPYING),
        ("nodes", np.int64),  # at most, without the root
        ("children", np.int64),  # per node at most; 1 for chains
        ("corrected", np.bool_),  # whether probabilities along chains are corrected
        ("counted", np.bool_),  # whether outcomes are counted in the calibration
    ],
    align=True,
)
"""What is kept of a sequence from step to step, besides its draft and its index; and how it is drafted for."""
TEMPLATE_NODE = np.dtype([("parent", np.int64), ("rank", np.int64), ("node", np.int64)], align=True)
"""A node of a template, which is filled with the candidate of that rank; and the node of the draft that fills it, -1
where it was left out.
"""


def new_sequence(nodes: int, children: int, corrected: bool, counted: bool) -> np.ndarray:
    """Return a new sequence, (1,) of `SEQUENCE`."""
    sequence = np.zeros(1, SEQUENCE)
    sequence["recent"] = ABSENT
    sequence["nodes"], sequence["children"] = nodes, children
    sequence["corrected"], sequence["counted"] = corrected, counted
    return sequence


def new_tree(nodes: int) -> np.ndarray:
    """Return an empty tree of up to `nodes` nodes, the root included: (nodes,) of `NODE`."""
    tree = np.zeros(nodes, NODE)
    tree["copies"]["place"] = ABSENT
    return tree


@compiled(allocates=False)
def advance(
    sequences: np.ndarray, tree: np.ndarray, template: np.ndarray,
    index_tokens: np.ndarray, index_before: np.ndarray, index_newest: np.ndarray, index_added: np.ndarray,
    row_candidates: np.ndarray, row_shares: np.ndarray, row_keys: np.ndarray,
    history_tokens: np.ndarray, history_before: np.ndarray, history_newest: np.ndarray, history_added: np.ndarray,
    calibration: np.ndarray, outcomes: np.ndarray,
    mixed: np.ndarray, recent: np.ndarray, alternative: np.ndarray, matches: np.ndarray, longest: np.ndarray,
    written: np.ndarray, outcome_of: int, indexed: int, grown: int, max_depth: int, least: float, costs: np.ndarray,
    ratio: float, parent: int, token: int, probability: float, mask: np.ndarray,
) -> tuple[int, int, float]:  # fmt: skip
    """Count the outcome of the last draft, read what was written since, and draft: all that a sequence computes in a
    step. Return how many nodes pay, the root included, how many have grown, and the gain of the best candidate that was
    not added; 0 without one.

    This is one function, since numba compiles all that it calls again for each function that is called from Python. Its
    first arguments stay the same from step to step: one sequence with its draft, `template` (empty where trees grow)
    and index; then what all sequences share, which is the arrays of an `NgramMatrix`. numba takes six microseconds more
    for tuples of them.

    `written` (n,) int64: tokens since the last draft, of whose `outcome_of` nodes they tell the outcome (0: it was
    counted); from number `indexed` of the index on they are read (-1: not at all).

    Nodes are added to a draft of `grown` nodes, 0 for a new one, while more may pay; none is deeper than `max_depth`
    (-1: no draft), none gains `least` or less. `costs` (m,) float64: time of verifying 1, 2, ... nodes, in any unit;
    empty where every node pays. `ratio`: accepted / predicted tokens of earlier drafts, which scales gains.

    `mask` (see `_keep_allowed`), where it is not empty, restricts candidates of the first node that is added. With a
    `parent` that is only `token`, with its probability; its candidates are not looked up if the mask is empty.
    """
    sequence, index = sequences[0], IndexArrays(index_tokens, index_before, index_newest, index_added)
    copying = sequence.copying
    sources = Sources(
        Rows(row_candidates, row_shares, row_keys),
        index,
        IndexArrays(history_tokens, history_before, history_newest, history_added),
        calibration,
        copying,
        Mixture(mixed, recent, alternative, matches, longest),
    )
    if outcome_of and sequence.counted:
        _count_chosen(tree, outcome_of, written, calibration)
    if outcome_of and sequence.corrected:
        _count_outcome(tree, outcome_of, written, sequence.outcomes, outcomes[0])
    if indexed >= 0:
        _read(index, copying, written, indexed)
    if max_depth < 0:
        return 0, 0, 0.0
    if parent >= 0:
        _put_below(tree, grown, parent, tree[parent].drafted, token, np.float32(probability), copying, index)
        if not len(mask):
            return 0, grown + 1, 0.0
    elif grown == 0:
        _begin(sequence, tree, written)
        if len(template):
            template[0].node = template[0].rank = 0
        if len(index.tokens):
            begin_draft(copying, index, tree)
    correction = _corrections(sequence.outcomes, outcomes[0]) if sequence.corrected else (1.0, 1.0)
    paying, gain, expected, rate = max(grown, 1), 0.0, 1 / ratio, 0.0  # in units of the unscaled gains
    added = grown == 0 or parent >= 0
    while True:
        if added:
            _consider(tree, grown, sequence.recent, sources)
            if len(mask):
                _keep_allowed(tree[grown], mask)
            grown, expected = grown + 1, expected + gain
            if parent >= 0:
                return 0, grown, 0.0
            if not len(costs):
                paying = grown
            elif expected / costs[grown - 1] >= rate:
                paying, rate = grown, expected / costs[grown - 1]
        if grown > sequence.nodes:
            return paying, grown, 0.0
        if len(template):
            above, rank, gain = _next_of_template(tree, grown - 1, template, max_depth)
        else:
            above, rank, gain = _next(tree, grown, sequence.children, max_depth, correction)
        if gain <= least or not may_pay(costs, grown, expected, rate, gain):
            return paying, grown, gain
        token, probability = tree[above].candidates[rank], tree[above].probabilities[rank]
        _put_below(tree, grown, above, rank, token, np.float32(probability), copying, index)
        if sequence.children == 1:
            tree[grown].value = gain
        added = True


@compiled_part
def _begin(sequence: Record, tree: np.ndarray, written: np.ndarray) -> None:
    """Begin a tree with the newest token, after tokens (n,) int64 that were written since the last one began."""
    recent, count = sequence.recent, len(written)
    for place in range(LONGEST - 1, -1, -1):
        recent[place] = written[count - 1 - place] if place < count else recent[place - count]
    root = tree[0]
    root.token, root.parent, root.rank, root.depth, root.value = recent[0], -1, 0, 0, 1


@compiled_part
def _read(index: IndexArrays, copying: Record, tokens: np.ndarray, indexed: int) -> None:
    """Index new tokens (n,) int64 of a sequence of which `indexed` are indexed, and follow what they were copied
    from.
    """
    for place in range(len(tokens)):
        if indexed + place >= copying.prompt:
            follow(copying, index, tokens[place])
        append_one(index, tokens[place])


@compiled_part
def _put_below(
    tree: np.ndarray, node: int, parent: int, rank: int, token: int, probability: float, copying: Record,
    index: IndexArrays,
) -> None:  # fmt: skip
    """Add a token below a node, as the newest node, with that rank among the candidates of its parent."""
    new, above = tree[node], tree[parent]
    new.token, new.parent, new.depth, new.rank = token, parent, above.depth + 1, rank
    new.value = above.value * probability
    new.known = new.drafted = 0
    if above.drafted <= rank:
        above.drafted = rank + 1
    go_on(copying, index, tree, parent, node, token)


@compiled_inline
def _consider(tree: np.ndarray, node: int, recent: np.ndarray, sources: Sources) -> None:
    """Find the candidates after the newest node; `recent` (LONGEST,) int64: the tokens up to the root, newest first."""
    new, mixture, known, above = tree[node], sources.mixture, np.int64(0), np.int64(node)
    for place in range(LONGEST):
        if place < new.depth:
            mixture.recent[place], above = tree[above].token, tree[above].parent
        else:
            mixture.recent[place] = recent[place - new.depth]
    for number in range(mix(sources, new)):
        candidate, place = mixture.candidates[number], known
        while place > 0 and new.probabilities[place - 1] < candidate.probability:
            if place < CHILDREN:
                new.candidates[place], new.cells[place] = new.candidates[place - 1], new.cells[place - 1]
                new.probabilities[place] = new.probabilities[place - 1]
            place -= 1
        if place < CHILDREN:
            new.candidates[place], new.cells[place] = candidate.token, candidate.cell
            new.probabilities[place] = candidate.probability
            known = min(known + 1, np.int64(CHILDREN))
    new.known, new.drafted = known, 0
    if node == 0:
        longest = mixture.longest[0]
        find(sources.copying, tree, longest.place, longest.length)


@compiled_part
def _keep_allowed(node: Record, mask: np.ndarray) -> None:
    """Drop the candidates of a node that a grammar forbids; they do not count for the calibration either. `mask`
    (words,) int32: one bit per token, lowest first, set if the token is allowed.
    """
    known = np.int64(0)
    for rank in range(node.known):
        token = node.candidates[rank]
        if token < 32 * len(mask) and mask[token >> 5] >> (token & 31) & 1:
            node.candidates[known], node.cells[known] = token, node.cells[rank]
            node.probabilities[known] = node.probabilities[rank]
            known += 1
    node.known = known


@compiled_part
def _next(
    tree: np.ndarray, grown: int, children: int, max_depth: int, correction: tuple[float, float]
) -> tuple[int, int, float]:
    """Return the parent, rank and probability of the best candidate among `grown` nodes; probability 0: none."""
    parent, best = np.int64(-1), np.float32(0.0)
    for number in range(grown):
        node = tree[number]
        rank = node.drafted
        if rank < node.known and rank < children and node.depth < max_depth:
            value = node.value * node.probabilities[rank]
            if value > best:
                parent, best = np.int64(number), value
    if parent < 0:
        return parent, np.int64(0), 0.0
    if children > 1:
        return parent, tree[parent].drafted, np.float64(best)
    corrected = _corrected(tree[parent].probabilities[0], correction)
    return parent, np.int64(0), np.float64(tree[parent].value * corrected)


@compiled_part
def _next_of_template(tree: np.ndarray, newest: int, template: np.ndarray, max_depth: int) -> tuple[int, int, float]:
    """Return the same for a template, of which the root's `rank` says how many nodes are handled; `newest` fills the
    last of these. Nodes without such a candidate are left out, with the nodes below them.
    """
    handled = template[0].rank
    template[handled].node = newest
    for place in range(handled + 1, len(template)):
        parent, rank = template[template[place].parent].node, template[place].rank
        if parent >= 0 and rank < tree[parent].known and tree[parent].depth < max_depth:
            template[0].rank = place
            return parent, rank, 1.0
        template[place].node = -1
    return np.int64(-1), np.int64(0), 0.0


@compiled_part
def _count_chosen(tree: np.ndarray, nodes: int, chosen: np.ndarray, calibration: np.ndarray) -> None:
    """Count which kinds of candidates were right along `chosen`, the tokens after the root of a draft of `nodes`
    nodes.
    """
    number = 0
    for place in range(len(chosen)):
        node, token = tree[number], chosen[place]
        for rank in range(node.known):
            count(calibration, node.cells[rank], node.candidates[rank] == token)
        parent, number = number, -1
        for child in range(parent + 1, nodes):
            if tree[child].parent == parent and tree[child].token == token:
                number = child
                break
        if number < 0:
            return


@compiled_part
def _count_outcome(tree: np.ndarray, nodes: int, chosen: np.ndarray, own: Record, shared: Record) -> None:
    """Count the outcome of a chain of `nodes` nodes, where `chosen` are the tokens after the root: for its sequence and
    for all.
    """
    verified, rejected, expected = 0.0, 0.0, 0.0
    for place in range(min(len(chosen), nodes - 1)):
        verified += 1
        expected += 1 - tree[place].probabilities[0]
        if tree[place + 1].token != chosen[place]:
            rejected = 1.0
            break
    _decay_and_add(own, _OF_SEQUENCE, verified, rejected, expected)
    _decay_and_add(shared, _OF_ALL, verified, rejected, expected)


@compiled_part
def _decay_and_add(outcomes: Record, decay: float, verified: float, rejected: float, expected: float) -> None:
    outcomes.verified = outcomes.verified * decay + verified
    outcomes.rejected = outcomes.rejected * decay + rejected
    outcomes.expected = outcomes.expected * decay + expected


@compiled_part
def _corrections(own: Record, shared: Record) -> tuple[float, float]:
    """Return observed / expected rejections of a sequence, and the same of acceptances; the prior is the average of
    all.
    """
    all_wrong = (shared.rejected + 1) / (shared.expected + 1)
    all_right = (shared.verified - shared.rejected + 1) / (shared.verified - shared.expected + 1)
    return (
        (own.rejected + _PRIOR * all_wrong) / (own.expected + _PRIOR),
        (own.verified - own.rejected + _PRIOR * all_right) / (own.verified - own.expected + _PRIOR),
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
