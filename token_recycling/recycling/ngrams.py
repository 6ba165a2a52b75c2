"""n-grams and their rows, as used by compiled code.

An n-gram is the last tokens up to a position of a sequence or a tree, newest first. A row contains the candidates after
an n-gram and their probabilities in 16 bits. Rows of single tokens are indexed by token; those of longer n-grams are in
a table of fixed size, indexed by a hash. Cost of a look-up: that hash.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part

ABSENT = -1
"""No token: before the beginning of the sequence, or unknown."""
FULL = 65_535
"""The probability 1 in 16 bits."""


@compiled
def ngrams_at(tokens: np.ndarray, ends: np.ndarray, counts: np.ndarray, orders: int) -> np.ndarray:
    """Return the last `counts` (rows,) n-grams of sequences (rows, longest) up to `ends` (rows,): (n, orders) int64."""
    total = np.int64(0)
    for row in range(len(counts)):
        total += counts[row]
    ngrams, number = np.empty((total, orders), np.int64), 0
    for row in range(len(counts)):
        for back in range(counts[row] - 1, -1, -1):
            for order in range(orders):
                position = ends[row] - back - order
                ngrams[number, order] = np.int64(tokens[row, position]) if position >= 0 else np.int64(ABSENT)
            number += 1
    return ngrams


class Rows(NamedTuple):
    """The arrays of an `NgramMatrix`: first the rows of single tokens, by token, then the hashed rows."""

    candidates: np.ndarray  # (rows, k) int32, best first
    shares: np.ndarray  # (rows, k) uint16: probabilities, 65,535 for 1; first 0 where nothing was learned
    keys: np.ndarray  # (hashed rows,) int64: hash of the n-gram of a row; 0 where free


@compiled_part
def find_row(rows: Rows, ngram: np.ndarray, order: int) -> int:
    """Return the row of the last `order` tokens of an n-gram, or -1 if there is none."""
    vocab_size = len(rows.candidates) - len(rows.keys)
    if order == 1:
        learned = 0 <= ngram[0] < vocab_size and rows.shares[ngram[0], 0] > 0
        return ngram[0] if learned else -1
    if len(rows.keys) == 0 or ngram[order - 1] < 0:
        return -1
    key = key_of(ngram, order)
    slot = key % len(rows.keys)
    return vocab_size + slot if rows.keys[slot] == key else -1


@compiled(allocates=False)
def row_of(rows: Rows, ngram: np.ndarray, order: int) -> int:
    """Call `find_row` for a caller in Python: compiled separately, since drafting does not need it."""
    return find_row(rows, ngram, order)


@compiled_part
def key_of(ngram: np.ndarray, order: int) -> int:
    """Return a hash of the last `order` tokens: the finalizer of splitmix64, token by token; always positive."""
    mixed = np.uint64(order)
    for place in range(order):
        mixed = (mixed + np.uint64(ngram[place])) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
    return np.int64(mixed >> np.uint64(1)) | np.int64(1)
