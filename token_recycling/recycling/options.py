"""The options of whatever recycles: of the drafter, and of every engine."""

from __future__ import annotations

from dataclasses import dataclass

from .ngram_matrix import NgramMatrix, check_options


@dataclass(kw_only=True)
class Options:
    """How much is remembered, wherever drafts are recycled."""

    k: int = 8
    """Candidates kept after every context."""
    orders: int = 3
    """Most tokens of a context, 1 to 4; 1 is the adjacency matrix of the paper."""
    memory: float = 16.0
    """Megabytes for contexts of two tokens and more: some 290,000 of them."""
    suffix: bool = True
    """Draft what followed where the last tokens stood in the sequence before."""
    history: int = 1_048_576
    """How many tokens of earlier outputs are kept, the newest: drafted is what followed there too; up to 20 MB."""

    def __post_init__(self) -> None:
        check_options(self.k, self.orders, self.memory, self.history)

    def new_matrix(self, vocab_size: int) -> NgramMatrix:
        """An empty matrix of these sizes; raises ValueError for more candidates than tokens."""
        return NgramMatrix(vocab_size, self.k, self.orders, self.memory, self.history)
