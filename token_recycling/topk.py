"""The candidates that a model computes anyway: the k likeliest tokens after every node, with their probabilities.

On a CPU one compiled pass finds the largest logit of every group of 64; the k largest lie in the k groups of largest
maximum. That takes half the time of `topk`. Elsewhere the device does it, and only the k candidates come back.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

_GROUP = 64


def top_candidates(logits: torch.Tensor, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k likeliest tokens of each row of logits (n, vocabulary), best first, and their probabilities: (n, k) int32
    and (n, k) float32. Of equal logits the lower id comes first.
    """
    if logits.device.type == "cpu":
        ids = np.empty((len(logits), k), np.int32)
        probabilities = np.empty((len(logits), k), np.float32)
        rows = logits.detach().float().contiguous()
        _top(rows.numpy(), rows.logsumexp(dim=-1).numpy(), ids, probabilities)
        return ids, probabilities
    values, found = logits.topk(k, dim=-1)
    shares = (values.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
    packed = torch.cat([found.to(torch.int32), shares.view(torch.int32)], dim=1).cpu().numpy()
    return packed[:, :k], packed[:, k:].view(np.float32)


@njit(cache=True, fastmath={"nnan", "nsz", "reassoc"})  # so that several numbers are compared at once
def _largest(row: np.ndarray, start: int, stop: int) -> float:
    largest = row[start]
    for place in range(start + 1, stop):
        largest = max(largest, row[place])
    return largest


@njit(cache=True)
def _insert(best: np.ndarray, places: np.ndarray, value: float, place: int) -> None:
    """Puts a value larger than the last of `best` (descending) where it belongs, after those equal to it."""
    at = len(best) - 1
    while at > 0 and value > best[at - 1]:
        best[at], places[at] = best[at - 1], places[at - 1]
        at -= 1
    best[at], places[at] = value, place


@njit(cache=True)
def _top(logits: np.ndarray, normalisers: np.ndarray, ids: np.ndarray, probabilities: np.ndarray) -> None:
    n, vocab_size = logits.shape
    k, groups = ids.shape[1], (vocab_size + _GROUP - 1) // _GROUP
    peaks, chosen = np.empty(min(k, groups), np.float32), np.zeros(min(k, groups), np.int64)
    best = np.empty(k, np.float32)
    for node in range(n):
        row = logits[node]
        peaks[:], chosen[:] = -np.inf, -1
        for group in range(groups):
            peak = _largest(row, group * _GROUP, min(vocab_size, (group + 1) * _GROUP))
            if peak > peaks[-1]:
                _insert(peaks, chosen, peak, group)
        best[:], ids[node] = -np.inf, 0
        for group in np.sort(chosen):
            if group < 0:
                continue
            for token in range(group * _GROUP, min(vocab_size, (group + 1) * _GROUP)):
                if row[token] > best[-1]:
                    _insert(best, ids[node], row[token], token)
        for place in range(k):
            probabilities[node, place] = np.exp(best[place] - normalisers[node])
