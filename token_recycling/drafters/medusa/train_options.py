"""The options of `token-recycling train medusa`; `train` does the work."""

from __future__ import annotations

from dataclasses import dataclass

from .._shared.training.declaration import Training, option


@dataclass(frozen=True)
class MedusaTraining(Training):
    """Trains heads on the target's continuations of pieces of FILES; use them as --drafter medusa:heads=FOLDER."""

    heads: int = option(4, "Heads, each of which predicts one more token ahead.", min=1)
    blocks: int = option(1, "Residual blocks of a head.", min=1)
    own_output: bool = option(False, "An output layer for each head, as in the paper: large.")
    decay: float = 0.8
    """Weight of a head's loss: this to the power of its number."""
    batch: int = option(2, "Outputs per batch.", min=1)
    seed: int = option(0, "Random seed.", min=0)

    held_out_use = "the accuracy is measured on"
