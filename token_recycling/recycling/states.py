"""What was learned of hidden states: how the state at a token follows from the one before and the token's embedding.

A pair is the state at a place and the embedding of the token that follows, and the state there. Its linear part is
fitted to sums over pairs, which take no more room for a million of them than for a thousand; a hidden layer on top,
which learns from the newest ones, corrects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

_MOST = 200_000
"""Pairs beyond which older ones fade."""
_WIDEST = 1024
"""Most units of the hidden layer; it has no more than a state has numbers."""


@dataclass
class LearnedStates:
    """Sums over pairs of inputs (2 * hidden + 1: state, embedding and 1) and the states that follow (hidden), and the
    weights of the hidden layer.
    """

    products: np.ndarray
    """(2 * hidden + 1, 2 * hidden + 1) float32: of inputs with inputs; the last one is the number of pairs."""
    targets: np.ndarray
    """(2 * hidden + 1, hidden) float32: of inputs with the states that follow."""
    tokens: np.ndarray
    """(vocabulary,) float32: how often each token was seen in texts."""
    into: np.ndarray
    """(2 * hidden + 1, width) float32: from inputs over their root mean square to the hidden layer."""
    out: np.ndarray
    """(width, hidden) float32: from the hidden layer to what it adds, in units of a state's root mean square."""

    @classmethod
    def empty(cls, hidden: int, vocab_size: int) -> LearnedStates:
        """Nothing learned: a hidden layer that adds nothing."""
        inputs, width = 2 * hidden + 1, min(hidden, _WIDEST)
        into = np.random.default_rng(0).standard_normal((inputs, width), np.float32) / np.float32(inputs**0.5)
        products, targets = np.zeros((inputs, inputs), np.float32), np.zeros((inputs, hidden), np.float32)
        out = np.zeros((width, hidden), np.float32)
        return cls(products, targets, np.zeros(vocab_size, np.float32), into, out)

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> LearnedStates | None:
        """Those of a file, if it has any; files of version 4 know no hidden layer."""
        if "state_products" not in arrays:
            return None
        found = cls.empty(arrays["state_targets"].shape[1], len(arrays["state_tokens"]))
        for field in fields(cls):
            setattr(found, field.name, arrays.get(f"state_{field.name}", getattr(found, field.name)))
        return found

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything, by its name in a file."""
        return {f"state_{field.name}": getattr(self, field.name) for field in fields(self)}

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

    def sizes(self) -> np.ndarray:
        """(2 * hidden + 1,) float32: the root mean square of each input, over 0."""
        return np.sqrt(np.maximum(np.diagonal(self.products) / max(1, self.pairs), np.finfo(np.float32).tiny))
