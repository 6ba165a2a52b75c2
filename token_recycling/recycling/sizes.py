"""Sizes of matrices: validation, and the fit of a matrix to a target."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

logger = logging.getLogger("token_recycling")


def check_sizes(vocab_size: int, k: int) -> None:
    """Raise ValueError unless a matrix with that vocabulary can have k candidates per row."""
    if vocab_size < 1 or not 1 <= k <= vocab_size:
        raise ValueError(f"k must be from 1 to the vocabulary size, got vocabulary {vocab_size} and k {k}")


def check_vocabulary(learned: int, vocab_size: int) -> None:
    """Raise ValueError if a matrix was learned with a vocabulary size other than the target's."""
    if learned != vocab_size:
        raise ValueError(
            f"the drafter has a vocabulary of {learned} tokens, the target {vocab_size}; create a new drafter"
        )


class _Matrix(Protocol):
    @property
    def vocab_size(self) -> int: ...


M = TypeVar("M", bound=_Matrix)


def fitting(matrix: M | None, vocab_size: int) -> M | None:
    """Return the matrix if it fits a target of that vocabulary; else None, with a warning if its size differs."""
    if matrix is None or matrix.vocab_size == vocab_size:
        return matrix
    logger.warning(
        "the drafter's matrix has a vocabulary of %d tokens, the target has %d: starting again with an empty matrix",
        matrix.vocab_size,
        vocab_size,
    )
    return None
