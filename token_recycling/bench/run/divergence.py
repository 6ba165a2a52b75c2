"""The first divergence of two outputs of one model, and its logit margin: whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Divergence:
    """The first divergence of two outputs."""

    position: int
    """Index of the first token that differs, counted from the end of the prompt."""
    expected: int | None
    got: int | None
    """The two tokens there; None where an output has ended."""
    margin: float
    """The model's largest logit there minus its second largest; in near-ties rounding decides."""
    between: float | None
    """The model's logit of `expected` minus that of `got`; None where an output has ended."""

    def __str__(self) -> str:
        return (
            f"token {self.position} is {self.got}, expected {self.expected}, "
            f"where the model's best two logits are {self.margin:.3g} apart"
        )


@torch.no_grad()
def first_divergence(
    model: PreTrainedModel, prompt: torch.Tensor, expected: Sequence[int], got: Sequence[int]
) -> Divergence | None:
    """Return the first divergence of two outputs after `prompt` (length,), or None if they are equal."""
    for position, (one, other) in enumerate(zip_longest(expected, got)):
        if one != other:
            text = torch.cat([prompt, prompt.new_tensor(expected[:position])])
            logits = model(input_ids=text[None].to(model.device), use_cache=False).logits[0, -1].float()
            best, second = logits.topk(2).values.tolist()
            between = None if one is None or other is None else float(logits[one] - logits[other])
            return Divergence(position, one, other, best - second, between)
    return None
