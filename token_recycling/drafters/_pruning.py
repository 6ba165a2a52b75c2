"""Pruning: keep the most probable nodes of finished drafts, as many as give the most expected tokens per time.

One rule for a draft model's tree, MTP layers, fused drafters, and the sequences of a batch that share a forward pass.
Trees of the recycler are pruned while they grow, in compiled code (`recycling.growth`), by the same rule
(`costs.budget`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..costs.budget import paying_size

if TYPE_CHECKING:
    from ..trees.draft import Draft

ROOT = frozenset({0})


def prune(
    drafts: Sequence[Draft], times: np.ndarray, most: int | None = None, kept: frozenset[int] = ROOT
) -> list[Draft]:
    """Return each draft with its most probable nodes, the same number of each: at most `most` besides the root.

    `times` (m,) are those of steps over 1, 2, ... nodes of every draft, drafting overhead included; if it is empty,
    every node pays. Nodes in `kept`, which is closed under parents, stay. A draft without probabilities, or with
    sampled nodes that are not `kept`, stays whole.
    """
    ranked = [draft.ranked(kept) for draft in drafts]
    whole = max((len(draft) for draft, order in zip(drafts, ranked, strict=True) if order is None), default=1)
    size = max(map(len, drafts)) if most is None else most + 1
    if len(times):
        values = [
            np.ones(1) if order is None or draft.values is None else draft.values[order]
            for draft, order in zip(drafts, ranked, strict=True)
        ]
        size = paying_size(values, times[:size], max(whole, len(kept)))
    return [
        draft if order is None else draft.part(sorted(order[:size].tolist()))
        for draft, order in zip(drafts, ranked, strict=True)
    ]
