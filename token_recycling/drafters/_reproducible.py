"""A drafter that starts fresh for every sequence, so that equal requests give equal outputs in 16-bit types too.

The other rows of a forward pass affect the rounding of a node's sums: their number, and the slots of the node's
ancestors. In 16 bits near-ties then resolve differently. So drafts must depend on the sequence alone: nothing is
learned from other sequences, nothing is measured (`loop.pacer`). Cost: the benefit of learning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..model.target import Target
from ._base import Drafter, DrafterTraits, SequenceDrafter


@dataclass
class Reproducible(Drafter):
    """Starts a fork of the original drafter for every sequence."""

    base: Drafter

    def __post_init__(self) -> None:
        if not self.base.traits.reproducible:
            raise ValueError(
                f"reproducible=True needs a drafter whose drafts depend on the sequence alone, got "
                f"{self.base.describe()}; choose another drafter, such as recycling, or omit it"
            )
        self.base = self.base.fork()

    @property
    def traits(self) -> DrafterTraits:
        return replace(self.base.traits, isolates_requests=True)

    def warm_up(self, device: torch.device) -> None:
        self.base.warm_up(device)

    def fit(self, target: Target) -> None:
        self.base.fit(target)

    def fit_again(self, target: Target) -> None:
        self.base.fit_again(target)

    def start(self, prompt: torch.Tensor, target: Target) -> SequenceDrafter:
        return self.base.fork().start(prompt, target)

    def fork(self) -> Reproducible:
        """Return itself: nothing is learned."""
        return self

    def describe(self) -> str:
        return f"{self.base.describe()}; reproducible"
