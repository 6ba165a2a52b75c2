"""What was learned of hidden states: sums from which the next state is predicted by least squares.

A pair is the state at a place and the embedding of the token that follows, and the state there. Pairs are summed up,
never kept: a million of them take no more room or time than a thousand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

_MOST = 200_000
"""Pairs beyond which older ones fade."""


@dataclass
class StateSums:
    """Sums over pairs of inputs (2 * hidden + 1: state, embedding and 1) and the states that follow (hidden)."""

    products: np.ndarray
    """(2 * hidden + 1, 2 * hidden + 1) float32: of inputs with inputs; the last one is the number of pairs."""
    targets: np.ndarray
    """(2 * hidden + 1, hidden) float32: of inputs with the states that follow."""
    tokens: np.ndarray
    """(vocabulary,) float32: how often each token was seen in texts."""

    @classmethod
    def empty(cls, hidden: int, vocab_size: int) -> StateSums:
        inputs = 2 * hidden + 1
        return cls(
            np.zeros((inputs, inputs), np.float32),
            np.zeros((inputs, hidden), np.float32),
            np.zeros(vocab_size, np.float32),
        )

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> StateSums | None:
        """Those of a file, if it has any."""
        if "state_products" not in arrays:
            return None
        return cls(*(arrays[name] for name in ("state_products", "state_targets", "state_tokens")))

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything, by its name in a file."""
        return {"state_products": self.products, "state_targets": self.targets, "state_tokens": self.tokens}

    @property
    def hidden(self) -> int:
        return self.targets.shape[1]

    @property
    def pairs(self) -> int:
        return int(self.products[-1, -1])

    def add(self, products: np.ndarray, targets: np.ndarray) -> None:
        """Adds the sums of some pairs."""
        if self.pairs > _MOST:
            for array in (self.products, self.targets, self.tokens):
                array *= 0.5
        self.products += products
        self.targets += targets
