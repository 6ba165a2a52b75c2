"""The options of `token-recycling train medusa`; `train` does the work."""

from __future__ import annotations

from dataclasses import dataclass

from .._shared.training.declaration import Training


@dataclass(frozen=True)
class MedusaTraining(Training):
    """Trains heads on the target's continuations of pieces of FILES; use them as --drafter medusa:heads=FOLDER."""

    heads: int = 4
    """Heads, each of which predicts one more token ahead."""
    blocks: int = 1
    """Residual blocks of a head."""
    own_output: bool = False
    """An output layer for each head, as in the paper: large."""
    decay: float = 0.8
    """Weight of a head's loss: this to the power of its number."""
    batch: int = 2
    """Outputs per batch."""
    seed: int = 0
    """Random seed."""
