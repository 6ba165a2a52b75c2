"""n-grams: the last tokens up to a place of a text or a tree, in arrays with the newest token first."""

from __future__ import annotations

import numpy as np

from .._util.compiled import compiled

ABSENT = -1
"""No token: in an n-gram before the beginning of the text, elsewhere one that is not known."""


def last_ngram(tokens: np.ndarray, orders: int) -> np.ndarray:
    """(orders,) int64: the n-gram that ends with the last token of a text (length,)."""
    ngram = np.full(orders, ABSENT, np.int64)
    last = tokens[-orders:]
    ngram[: len(last)] = last[::-1]
    return ngram


@compiled
def ngrams_at(tokens: np.ndarray, ends: np.ndarray, counts: np.ndarray, orders: int) -> np.ndarray:
    """(n, orders) int64: the n-grams that end at the last places of texts in rows (rows, longest): of each as many as
    `counts` (rows,) says, up to its place `ends` (rows,).
    """
    total = np.int64(0)
    for row in range(len(counts)):
        total += counts[row]
    ngrams, made = np.empty((total, orders), np.int64), 0
    for row in range(len(counts)):
        for back in range(counts[row] - 1, -1, -1):
            for order in range(orders):
                place = ends[row] - back - order
                ngrams[made, order] = np.int64(tokens[row, place]) if place >= 0 else np.int64(ABSENT)
            made += 1
    return ngrams


@compiled
def ngrams_below(root: np.ndarray, parents: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """(n, orders) int64: the n-gram at each node of a tree, from `root` (orders,), the one at its root."""
    ngrams = np.empty((len(parents), len(root)), np.int64)
    for place in range(len(root)):
        ngrams[0, place] = root[place]
    for node in range(1, len(parents)):
        ngrams[node, 0] = tokens[node]
        for place in range(1, len(root)):
            ngrams[node, place] = ngrams[parents[node], place - 1]
    return ngrams
