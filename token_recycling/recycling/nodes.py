"""Nodes of a growing draft, each with its candidates, most probable first (`mixture`).

Cost: two microseconds per node.
"""

from __future__ import annotations

import numpy as np

from .._util.compiled import compiled_inline, compiled_part
from .copying import COPY, HYPOTHESES, Record, find, go_on
from .mixture import Sources, mix
from .ngrams import ABSENT
from .suffix_index import LONGEST, IndexArrays

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


def new_tree(nodes: int) -> np.ndarray:
    """Return an empty tree of up to `nodes` nodes, the root included: (nodes,) of `NODE`."""
    tree = np.zeros(nodes, NODE)
    tree["copies"]["place"] = ABSENT
    return tree


@compiled_part
def put_below(
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
def consider(tree: np.ndarray, node: int, recent: np.ndarray, sources: Sources) -> None:
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
def keep_allowed(node: Record, mask: np.ndarray) -> None:
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
