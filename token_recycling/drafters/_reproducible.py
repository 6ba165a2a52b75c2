"""A drafter that begins again with every sequence, so that equal requests give equal outputs in 16 bits too.

What shares a pass with a node decides how its sums are rounded: how many rows there are, and in which columns its
ancestors stand. In 16 bits nearly equal candidates then change places. So whatever is drafted must follow from the
sequence alone: nothing that others have taught, nothing that was measured (`costs.fixed`). Cost: what would have been
known.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..costs.costs import Costs
from ..model.tree_model import TreeModel
from ._base import Drafter, DrafterTraits, SequenceDrafter


@dataclass
class Reproducible(Drafter):
    """Starts another one with what it had learned at first, for every sequence."""

    base: Drafter

    def __post_init__(self) -> None:
        if not self.base.traits.reproducible:
            raise ValueError(
                f"reproducible=True needs a drafter whose drafts depend on the sequence alone, got "
                f"{self.base.describe()}; choose another drafter, such as recycling, or leave it out"
            )
        self.base = self.base.fork()

    @property
    def traits(self) -> DrafterTraits:
        return replace(self.base.traits, begins_anew=True)

    def warm_up(self, device: torch.device) -> None:
        self.base.warm_up(device)

    def start(self, prompt: torch.Tensor, target: TreeModel, costs: Costs) -> SequenceDrafter:
        return self.base.fork().start(prompt, target, costs)

    def fork(self) -> Reproducible:
        """The same: nothing is learned."""
        return self

    def describe(self) -> str:
        return f"{self.base.describe()}; reproducible"
