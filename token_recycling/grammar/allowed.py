"""The target's most probable tokens among those that a grammar allows. Cost: `top_candidates`, plus microseconds per
row if few or nearly all tokens are allowed, else one pass over the vocabulary per row.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .._util.topk import top_candidates
from ..trees.draft import Step
from .state import State

_ENOUGH = 0.5
"""If the allowed top candidates have this total probability, the rest of the vocabulary is not searched."""


def top_allowed(step: Step, states: Mapping[int, State], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the k most probable allowed tokens after the nodes in `states` (n), and their probabilities: (n, k) int32
    and float32. Probabilities are relative to the allowed tokens, or to all if nearly all are allowed. Rows with fewer
    allowed tokens are filled with zeros.
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
