"""Medusa-1 heads: from the target's last hidden state, what it may say two, three, ... tokens later.

Cai et al., 2401.10774, section 2.1: a head is a residual block x + SiLU(Wx + b), W and b zero at first, and an output
layer that begins as the target's. With such output layers (`own_output`) four heads on the shipped target are as large
as the target itself. So by default a head's output layer is the target's times a learned square matrix that begins as
the identity: all heads are one more product with weights that are read once. The matrix is needed: SiLU hardly goes
below zero, so that the block alone could not subtract what the hidden state says about the next token.

Cost of a draft: the square matrices, and the output layer on a row for each head.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu
from transformers import PreTrainedModel

from .._shared.saved import TrainedPartError, load_part, save_part

KIND = "medusa"


class MedusaHeads(torch.nn.Module):
    """`heads` heads of `blocks` residual blocks each, over hidden states of one width."""

    def __init__(self, heads: int, width: int, blocks: int = 1, output: torch.Tensor | None = None) -> None:
        """`output` (vocabulary, width) is copied into an output layer per head; None: share the target's."""
        super().__init__()
        if heads < 1 or blocks < 1:
            raise ValueError(f"heads and blocks must be >= 1, got {heads} and {blocks}")
        self.weight = torch.nn.Parameter(torch.zeros(blocks, heads, width, width))
        self.bias = torch.nn.Parameter(torch.zeros(blocks, heads, 1, width))
        self.shares_output = output is None
        """Whether the target's output layer follows the heads."""
        output = torch.eye(width) if output is None else output.detach().float()
        self.output = torch.nn.Parameter(output.repeat(heads, 1, 1))

    @property
    def heads(self) -> int:
        return self.weight.shape[1]

    @property
    def width(self) -> int:
        """Size of the hidden states."""
        return self.weight.shape[2]

    def forward(self, hidden: torch.Tensor, shared: torch.nn.Module) -> torch.Tensor:
        """Return logits (heads, n, vocabulary) from hidden states (n, width); `shared` is the target's output layer."""
        states = hidden.to(self.weight.dtype).expand(self.heads, *hidden.shape)
        for weight, bias in zip(self.weight, self.bias, strict=True):
            states = states + silu(torch.baddbmm(bias, states, weight))
        states = torch.bmm(states, self.output.transpose(1, 2))
        return shared(states.to(hidden.dtype)) if self.shares_output else states


@dataclass
class SavedHeads:
    """Saved heads and their accuracy."""

    heads: MedusaHeads
    accuracy: list[list[float]]
    """For each head how often its candidate of each rank was the target's token, on held-out outputs."""
    facts: dict[str, Any]


def save_heads(
    folder: str | os.PathLike[str],
    heads: MedusaHeads,
    model: PreTrainedModel,
    accuracy: Sequence[Sequence[float]],
    **facts: Any,
) -> None:
    """Write `medusa.safetensors` and `medusa.json`, in the type of `heads`."""
    described = {"heads": heads.heads, "own_output": not heads.shares_output, "accuracy": accuracy, **facts}
    save_part(folder, KIND, heads.state_dict(), model, described)


def load_heads(folder: str | os.PathLike[str]) -> SavedHeads:
    """Return heads from a folder; raises TrainedPartError for a damaged one, FileNotFoundError if there are none."""
    tensors, facts = load_part(folder, KIND)
    weight, output, accuracy = tensors.get("weight"), tensors.get("output"), facts.get("accuracy")
    if (
        weight is None
        or output is None
        or (weight.ndim, output.ndim) != (4, 3)
        or not isinstance(accuracy, list)
        or len(accuracy) != weight.shape[1]
        or not all(isinstance(ranks, list) and ranks for ranks in accuracy)
    ):
        raise TrainedPartError(f"{folder}: heads or their accuracy are missing or malformed; train them again")
    heads = MedusaHeads(
        weight.shape[1], weight.shape[2], weight.shape[0], output[0] if facts.get("own_output") else None
    )
    try:
        heads.load_state_dict(tensors)
    except RuntimeError as error:
        raise TrainedPartError(f"{folder}: tensors do not match the heads ({error}); train them again") from None
    return SavedHeads(heads.requires_grad_(False), accuracy, facts)
