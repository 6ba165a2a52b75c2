"""Sizes of matrices: which there can be, and which fit a target."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

logger = logging.getLogger("token_recycling")


def check_sizes(vocab_size: int, k: int) -> None:
    """Raise ValueError unless a matrix of that vocabulary can have k candidates per row."""
    if vocab_size < 1 or not 1 <= k <= vocab_size:
        raise ValueError(f"k must be from 1 to the vocabulary size, got vocabulary {vocab_size} and k {k}")


def check_vocabulary(learned: int, vocab_size: int) -> None:
    """Raise ValueError if a matrix was learned with a vocabulary of another size than the target's."""
    if learned != vocab_size:
        raise ValueError(
            f"the drafter has learned from {learned} tokens, got a target of {vocab_size}; make a new drafter"
        )


class _Matrix(Protocol):
    @property
    def vocab_size(self) -> int: ...


M = TypeVar("M", bound=_Matrix)


def fitting(matrix: M | None, vocab_size: int) -> M | None:
    """Return the matrix for a target of that vocabulary; None if there is none, or of another size, which is logged."""
    if matrix is None or matrix.vocab_size == vocab_size:
        return matrix
    logger.warning(
        "the drafter has learned from %d tokens, got a target of %d: it starts again without what it learned",
        matrix.vocab_size,
        vocab_size,
    )
    return None
