"""The target's most probable tokens that a grammar allows. Cost: that of `top_candidates`, and microseconds per row
where few or nearly all tokens are allowed; elsewhere a pass over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .._util.topk import top_candidates
from ..trees.draft import Step
from .state import State

_ENOUGH = 0.5
"""Total probability of the allowed ones among the top candidates from which on the rest is not searched."""


def top_allowed(step: Step, states: Mapping[int, State], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k most probable allowed tokens after nodes with known `states` (n), and their probabilities among the
    allowed ones, or among all where nearly all are: (n, k) int32, float32. Where fewer are allowed, zeros follow.
    """
    ids, probabilities = np.zeros((len(states), k), np.int32), np.zeros((len(states), k), np.float32)
    nodes = np.array([*states])
    many = np.array([state.few is None for state in states.values()])
    if many.any():
        ids[many], probabilities[many] = step.top(k, nodes[many])
    for place, (node, state) in enumerate(states.items()):
        if state.few is not None:
            logits = step.logits[node, list(state.few)].float().cpu().numpy()
            shares = np.exp(logits - logits.max())
            best = np.argsort(-shares, kind="stable")[:k]
            ids[place, : len(best)] = np.array(state.few)[best]
            probabilities[place, : len(best)] = shares[best] / shares.sum()
            continue
        probabilities[place, ~state.allows(ids[place])] = 0
        if probabilities[place].sum() >= _ENOUGH:
            order = np.argsort(-probabilities[place], kind="stable")
            ids[place], probabilities[place] = ids[place, order], probabilities[place, order]
        else:
            masked = state.masked(step.logits[node].float().cpu().numpy())
            ids[place : place + 1], probabilities[place : place + 1] = top_candidates(masked[None], k)
    return ids, probabilities
