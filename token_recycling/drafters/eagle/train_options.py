"""The options of `token-recycling train eagle`; `train` does the work."""

from __future__ import annotations

from dataclasses import dataclass

from .._shared.training.declaration import Training


@dataclass(frozen=True)
class EagleTraining(Training):
    """Trains an EAGLE head on the target's continuations of pieces of FILES; use it as --drafter eagle:head=FOLDER."""

    version: int = 3
    """1: predicts hidden states (EAGLE-1 and -2); 3: predicts tokens (EAGLE-3)."""
    vocabulary: int = 32000
    """Tokens that a head of version 3 can predict: the most frequent ones."""
    intermediate: int = 0
    """Width within the layer's network; 0: as the target's."""
    unrolled: int = 0
    """Passes over its own outputs, each a token deeper; 0: as published, 1 or 7."""
    decay: float = 0.8
    """Weight of the loss of a pass, to the power of its number."""
    batch: int = 4
    """Outputs per batch."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ValueError(f"version must be 1 or 3, got {self.version}")

    @property
    def passes(self) -> int:
        """Passes of the head over a batch, the first one over the target's states."""
        return self.unrolled or (1 if self.version == 1 else 7)
