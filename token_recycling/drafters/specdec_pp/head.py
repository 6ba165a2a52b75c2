"""The acceptance head of SpecDec++: the probability that the target accepts a drafted token, given that it accepts
those before (Huang et al., 2405.19715, section 3.2).

It reads the draft model's last hidden state after that token. Cost per token: depth + 1 matrix products of one row. A
head is saved as a part of the draft model that it was trained on, by default in a subfolder of the model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from ...model.inspection import output_width
from .._shared.saved import TrainedPartError, check_model, load_part, save_part

KIND = "specdec_pp"
"""Name of the part, and of its folder within that of the draft model."""


class AcceptanceHead(torch.nn.Module):
    """Residual blocks x + SiLU(W x + b), and a linear layer to one number, the log odds of acceptance."""

    def __init__(self, width: int, depth: int) -> None:
        """`width`: the draft model's hidden size; `depth`: number of blocks. Initial odds are even."""
        super().__init__()
        linear = torch.nn.utils.skip_init  # no random numbers are used: seeded outputs equal those of `generate`
        self.blocks = torch.nn.ModuleList(linear(torch.nn.Linear, width, width) for _ in range(depth))
        self.output = linear(torch.nn.Linear, width, 1)
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    @torch.no_grad()
    def reset(self, seed: int = 0) -> None:
        """Set weights to start training from: blocks that differ from each other, still with even odds."""
        generator = torch.Generator().manual_seed(seed)
        for block in self.blocks:
            assert isinstance(block, torch.nn.Linear)
            block.weight.copy_(torch.randn(block.weight.shape, generator=generator) / self.width**0.5)

    @property
    def width(self) -> int:
        """Size of the states that it reads."""
        return self.output.in_features

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return log odds (...) from states (..., width)."""
        for block in self.blocks:
            states = states + torch.nn.functional.silu(block(states))
        return self.output(states)[..., 0]

    @torch.no_grad()
    def acceptance(self, state: torch.Tensor) -> float:
        """Return the probability that a token is accepted, from the state (width,) after it."""
        return float(torch.sigmoid(self(state.to(self.output.weight.dtype))))


def save_head(
    folder: str | os.PathLike[str], head: AcceptanceHead, draft: PreTrainedModel, facts: Mapping[str, Any]
) -> None:
    """Write a head for a draft model; `facts` say how it was trained."""
    save_part(folder, KIND, head.state_dict(), draft, {**facts, "width": head.width, "depth": head.depth})


def load_head(folder: str | os.PathLike[str], draft: PreTrainedModel) -> AcceptanceHead:
    """Return the head in a folder; raises TrainedPartError for a damaged or another one, FileNotFoundError for none."""
    tensors, facts = load_part(folder, KIND)
    check_model(folder, facts, draft)
    width, depth = facts.get("width"), facts.get("depth")
    if width != output_width(draft) or not isinstance(depth, int) or depth < 0:
        raise TrainedPartError(
            f"{folder}: width must be {output_width(draft)}, the draft model's hidden size, and depth must be >= 0, "
            f"got {width!r} and {depth!r}; give the head of this draft model, or train one"
        )
    head = AcceptanceHead(width, depth)
    try:
        head.load_state_dict(tensors)
    except RuntimeError:
        raise TrainedPartError(
            f"{folder}: weights do not match the {depth} blocks of width {width} in its JSON; train the head again"
        ) from None
    return head.eval().requires_grad_(False)
