"""The options of `token-recycling train specdec-pp`; `train` does the work."""

from __future__ import annotations

from dataclasses import dataclass

from .._shared.training.declaration import Training


@dataclass(frozen=True)
class SpecDecTraining(Training):
    """Trains a head that predicts rejections on the target's continuations of pieces of FILES; use the draft model with
    it as --drafter specdec_pp:model=FOLDER.
    """

    depth: int = 3  # this, the weight and the share are what the paper found good
    """Residual blocks."""
    rejection_weight: float = 6.0
    """Weight of a rejection relative to an acceptance."""
    target_share: float = 0.15
    """Share of the target's own tokens in what the head reads."""
    draft_temperature: float = 1.0
    """Sampling temperature of the draft model; 0: for greedy decoding."""
    batch: int = 16
    """Outputs per batch."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        if self.depth < 0 or self.draft_temperature < 0:
            raise ValueError(f"depth and draft_temperature must be >= 0, got {self.depth} and {self.draft_temperature}")
        if not self.rejection_weight > 0 or not 0 <= self.target_share < 1:
            raise ValueError(
                "rejection_weight must be > 0 and target_share from 0 to less than 1, "
                f"got {self.rejection_weight} and {self.target_share}"
            )
