"""Drafting for a batch of sequences: the most valuable nodes across all of them.

Each sequence grows its draft until the next node gains less than the threshold of the last batch; if more nodes pay,
the drafts keep growing. Cost per step: that of each `Recycler`, and a sort of all nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..costs import NO_COSTS, least_gain, paying_prefix
from .recycler import Recycler

_LOWER = 0.9
"""Nodes are first added down to this fraction of the gain that paid in the last batch."""


def draft_together(
    recyclers: Sequence[Recycler],
    sequences: Sequence[np.ndarray],
    max_depths: Sequence[int],
    costs: np.ndarray = NO_COSTS,
) -> list[int]:
    """Draft for the sequences (length,) of a batch; return how many nodes of each pay, the root included.

    The most valuable nodes across all sequences are kept. `costs` (m,) float64: time of verifying 1, 2, ... nodes of
    the whole batch. See `Recycler.draft`.
    """
    n = len(recyclers)
    if n == 1:
        paying, _ = recyclers[0].grow(sequences[0], max_depths[0], costs=costs)
        return [paying]
    matrix = recyclers[0].matrix
    least = _LOWER * matrix.least_gain if len(costs) else 0.0
    drafts = [
        recycler.grow(tokens, max_depth, least)
        for recycler, tokens, max_depth in zip(recyclers, sequences, max_depths, strict=True)
    ]
    if not len(costs):
        return [paying for paying, _ in drafts]
    next_gains = np.array([gain for _, gain in drafts])
    while True:
        gains = [recycler.gains(recycler.grown) for recycler in recyclers]
        sizes, values = [len(own) for own in gains], np.concatenate(gains)
        order = np.argsort(-values, kind="stable")
        expected = np.empty(1 + len(values))
        expected[0], expected[1:] = n, values[order]
        expected = expected.cumsum()
        least = least_gain(costs, n, expected)
        growing = np.flatnonzero(next_gains > least)
        if not len(growing):
            break
        for row in growing.tolist():
            next_gains[row] = recyclers[row].grow_further(max_depths[row], least)
    if math.isfinite(least):
        matrix.least_gain = least
    owners = np.repeat(np.arange(n), sizes)[order[: paying_prefix(costs, n, expected)]]
    return (1 + np.bincount(owners, minlength=n)).tolist()
