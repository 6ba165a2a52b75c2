"""Masks of allowed tokens: (words,) int32, one bit per token, lowest first, set if the token is allowed. Grammar
libraries and the compiled kernels use this format.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def words_of(vocab_size: int) -> int:
    """Return the number of 32-bit words of a mask of `vocab_size` tokens."""
    return (vocab_size + 31) // 32


def packed(allowed: np.ndarray) -> np.ndarray:
    """Return the mask (words,) of a (32 * words,) bool array."""
    return np.packbits(allowed, bitorder="little").view(np.int32)


def unpacked(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return whether a mask allows each of the first `vocab_size` tokens, (vocab_size,) bool; False beyond the mask."""
    bits = np.unpackbits(mask.view(np.uint8), count=min(vocab_size, 32 * len(mask)), bitorder="little")
    allowed = np.zeros(vocab_size, bool)
    allowed[: len(bits)] = bits
    return allowed


def mask_of(tokens: Sequence[int], words: int) -> np.ndarray:
    """Return the mask (words,) that allows these tokens, except ids beyond the mask."""
    ids, allowed = np.array(tokens, np.int64), np.zeros(32 * words, bool)
    allowed[ids[ids < len(allowed)]] = True
    return packed(allowed)
