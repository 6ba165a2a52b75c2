"""Options of the recycler, shared by the drafter and all engines."""

from __future__ import annotations

from dataclasses import dataclass

from .ngram_matrix import NgramMatrix, check_options


@dataclass(kw_only=True)
class Options:
    """Sizes and sources of the recycler."""

    k: int = 8
    """Candidates kept after every context."""
    orders: int = 3
    """Longest context in tokens, 1 to 4; 1 is the adjacency matrix of the paper."""
    memory: float = 16.0
    """Megabytes for contexts of two tokens and more: some 290,000 of them."""
    suffix: bool = True
    """Draft continuations of earlier occurrences of the last tokens in the sequence."""
    history: int = 1_048_576
    """Tokens of earlier outputs to keep, whose continuations are drafted too; up to 20 MB."""

    def __post_init__(self) -> None:
        check_options(self.k, self.orders, self.memory, self.history)

    def new_matrix(self, vocab_size: int) -> NgramMatrix:
        """Return an empty matrix of these sizes; raises ValueError for more candidates than tokens."""
        return NgramMatrix(vocab_size, self.k, self.orders, self.memory, self.history)
