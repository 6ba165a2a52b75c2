"""What is learned of n-grams: rows of a matrix, overwritten by what the target says after each.

The other half of `ngram_rows`. Cost: a fraction of a microsecond for an n-gram of each order, in compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part
from .._util.topk import exceeded
from .ngram_rows import FULL, Rows, find_row, key_of


class Observations(NamedTuple):
    """What the target said after each of n n-grams."""

    ngrams: np.ndarray
    """(n, orders) int64."""
    candidates: np.ndarray
    """(n, k) int32, best first."""
    probabilities: np.ndarray
    """(n, k) float32."""
    chosen: np.ndarray
    """(n,) int64: the token that followed, -1 where it is not known."""


@compiled
def overwrite(rows: Rows, seen: Observations, remembers: float | None, favours: float | None) -> None:
    """Overwrites the rows of all n-grams seen; see `NgramMatrix.learn`. A share of None compiles nothing for it."""
    vocab_size = len(rows.candidates) - len(rows.keys)
    ngrams, candidates, probabilities, chosen = seen
    n, k = candidates.shape
    ids, shares = np.empty(k, np.int32), np.empty(k, np.float32)
    merged_ids, merged = np.empty(2 * k, np.int32), np.empty(2 * k, np.float32)
    for node in range(n):
        if ngrams[node, 0] >= vocab_size:  # has an embedding, but is never emitted: it has no row
            continue
        for place in range(k):
            ids[place], shares[place] = candidates[node, place], probabilities[node, place]
        if favours is not None:  # noqa: SIM102 - numba leaves out what hangs on a None alone
            if chosen[node] >= 0:
                _favour(ids, shares, chosen[node], favours)
        for order in range(1, ngrams.shape[1] + 1):
            if ngrams[node, order - 1] < 0 or (order > 1 and len(rows.keys) == 0):
                break
            row = find_row(rows, ngrams[node], order)
            known = row >= 0
            if order == 1:
                row = ngrams[node, 0]
            elif not known:
                key = key_of(ngrams[node], order)
                row = vocab_size + key % len(rows.keys)
                rows.keys[row - vocab_size] = key
            wanted_ids, wanted = ids, shares
            if remembers is not None:  # noqa: SIM102
                if known:
                    _merge(rows, row, ids, shares, remembers, merged_ids, merged)
                    wanted_ids, wanted = merged_ids, merged
            for place in range(k):
                rows.candidates[row, place] = wanted_ids[place]
                rows.shares[row, place] = np.uint16(min(wanted[place], np.float32(1.0)) * FULL + np.float32(0.5))
            if not rows.shares[row, 0]:
                rows.shares[row, 0] = 1


@compiled_part
def _favour(ids: np.ndarray, shares: np.ndarray, chosen: int, favours: float) -> None:
    """Moves a share of `favours` from all candidates to the one that was emitted, which is put in order."""
    k = len(ids)
    place = k - 1
    for rank in range(k):
        shares[rank] *= 1 - favours
        if ids[rank] == chosen:
            place = rank
    value = favours + (shares[place] if ids[place] == chosen else np.float32(0.0))
    while place > 0 and shares[place - 1] < value:
        ids[place], shares[place] = ids[place - 1], shares[place - 1]
        place -= 1
    ids[place], shares[place] = chosen, value


@compiled_part
def _merge(
    rows: Rows, row: int, ids: np.ndarray, shares: np.ndarray, remembers: float, into: np.ndarray, sums: np.ndarray
) -> None:
    """The mean of an old row and a new one, the old weighted by `remembers`, the likeliest first."""
    k = len(ids)
    for place in range(k):
        into[place], sums[place] = ids[place], (1 - remembers) * shares[place]
    count = k
    for place in range(k):
        token, share = rows.candidates[row, place], remembers * rows.shares[row, place] / FULL
        for other in range(k):
            if into[other] == token:
                sums[other] += share
                break
        else:
            into[count], sums[count] = token, share
            count += 1
    _sort_descending(into, sums, count)


@compiled_part
def _sort_descending(ids: np.ndarray, shares: np.ndarray, count: int) -> None:
    """Sorts the first `count` candidates, the likeliest first; equal ones stay in order. They are few, and most of them
    in order already.
    """
    for place in range(1, count):
        token, share, at = ids[place], shares[place], place
        while at > 0 and shares[at - 1] < share:
            ids[at], shares[at] = ids[at - 1], shares[at - 1]
            at -= 1
        ids[at], shares[at] = token, share


@compiled
def foresees(rows: Rows, ngrams: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """(n,) bool: see `NgramMatrix.foresees`."""
    found, ngram = np.zeros(len(ngrams), np.bool_), np.empty(ngrams.shape[1], np.int64)
    for node in range(len(ngrams)):
        for place in range(len(ngram)):
            ngram[place] = ngrams[node, place]
        row = find_row(rows, ngram, len(ngram)) if chosen[node] >= 0 else np.int64(-1)
        found[node] = row >= 0 and rows.candidates[row, 0] == chosen[node]
    return found


@compiled
def surprising(rows: Rows, ngrams: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """(m,) int64: which of the n-grams (n, orders) have no row as a whole, or one that has another token first than the
    likeliest by logits (n, vocabulary).
    """
    found, ngram, count = np.empty(len(ngrams), np.int64), np.empty(ngrams.shape[1], np.int64), 0
    for node in range(len(ngrams)):
        for place in range(len(ngram)):
            ngram[place] = ngrams[node, place]
        row = find_row(rows, ngram, len(ngram))
        if row < 0 or exceeded(logits, node, logits[node, rows.candidates[row, 0]]):
            found[count] = node
            count += 1
    return found[:count]
