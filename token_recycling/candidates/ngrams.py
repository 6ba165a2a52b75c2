"""n-grams: the last tokens up to a place of a text or a tree, in arrays with the newest token first."""

from __future__ import annotations

import numpy as np

from ..compiled import compiled

ABSENT = -1
"""No token: in an n-gram before the beginning of the text, elsewhere one that is not known."""


def ngrams_of(tokens: np.ndarray, orders: int, before: np.ndarray | None = None) -> np.ndarray:
    """(n, orders) int64: the n-gram that ends with each token (n,) of a piece of text.

    `before` (orders - 1,) are the tokens before the piece, -1 where there are none.
    """
    if before is None:
        before = np.full(orders - 1, ABSENT, np.int64)
    whole = np.concatenate([before, tokens])
    return np.lib.stride_tricks.sliding_window_view(whole, orders)[:, ::-1].copy()


def last_ngram(tokens: np.ndarray, orders: int) -> np.ndarray:
    """(orders,) int64: the n-gram that ends with the last token of a text (length,)."""
    ngram = np.full(orders, ABSENT, np.int64)
    last = tokens[-orders:]
    ngram[: len(last)] = last[::-1]
    return ngram


def ngrams_at(tokens: np.ndarray, rows: np.ndarray, places: np.ndarray, orders: int) -> np.ndarray:
    """(n, orders) int64: the n-grams that end at n `places` (n,) of the texts in `rows` (n,) of `tokens`."""
    back = places[:, None] - np.arange(orders)
    found = tokens[rows[:, None], np.maximum(back, 0)]
    return np.where(back < 0, ABSENT, found).astype(np.int64)


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
