"""The rows of a matrix of n-grams, and how the row of an n-gram is found: what is read where trees are grown.

A row holds candidates and their probabilities in 16 bits. Those of single tokens stand at their place; those of longer
n-grams in a table of fixed size, at a hash of their tokens. Cost of a look-up: that hash, in compiled code.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part

FULL = 65_535
"""The probability 1 in 16 bits."""


class Rows(NamedTuple):
    """The arrays of a `NgramMatrix`; the rows of single tokens come first, by token, then the hashed ones."""

    candidates: np.ndarray
    """(rows, k) int32, best first."""
    shares: np.ndarray
    """(rows, k) uint16: probabilities, 65,535 for 1; 0 in the first place where nothing was learned."""
    keys: np.ndarray
    """(hashed rows,) int64: the n-gram of a hashed row, mixed into one number; 0 where free."""


@compiled(allocates=False)
def find_row(rows: Rows, ngram: np.ndarray, order: int) -> int:
    """The row of the last `order` tokens of an n-gram, or -1 if nothing was learned for them."""
    vocab_size = len(rows.candidates) - len(rows.keys)
    if order == 1:
        known = 0 <= ngram[0] < vocab_size and rows.shares[ngram[0], 0] > 0
        return ngram[0] if known else -1
    if len(rows.keys) == 0 or ngram[order - 1] < 0:
        return -1
    key = key_of(ngram, order)
    place = key % len(rows.keys)
    return vocab_size + place if rows.keys[place] == key else -1


@compiled_part
def key_of(ngram: np.ndarray, order: int) -> int:
    """A number for the last `order` tokens: the finalizer of splitmix64, token by token; never 0, never negative."""
    mixed = np.uint64(order)
    for place in range(order):
        mixed = (mixed + np.uint64(ngram[place])) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(27)
    return np.int64(mixed >> np.uint64(1)) | np.int64(1)
