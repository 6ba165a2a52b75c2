"""Where two texts of one model part, and how nearly its logits tie there: whether rounding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Divergence:
    """Where two texts part."""

    position: int
    """Index of the first token that differs, counted from the end of the prompt."""
    plain: int | None
    recycled: int | None
    """The two tokens there; None where a text has ended."""
    margin: float
    """The model's largest logit there minus its second largest; where they nearly tie, rounding decides."""
    between: float | None
    """The model's logit of `plain` minus that of `recycled`; None where a text has ended."""

    def __str__(self) -> str:
        return (
            f"token {self.position} is {self.plain} plain and {self.recycled} recycled, "
            f"where the model's best two logits are {self.margin:.3g} apart"
        )


@torch.no_grad()
def first_divergence(
    model: PreTrainedModel, prompt: torch.Tensor, plain: Sequence[int], recycled: Sequence[int]
) -> Divergence | None:
    """Where the two texts after `prompt` (length,) part, or None if they do not."""
    for position, (one, other) in enumerate(zip_longest(plain, recycled)):
        if one != other:
            text = torch.cat([prompt, prompt.new_tensor(plain[:position])])
            logits = model(input_ids=text[None].to(model.device), use_cache=False).logits[0, -1].float()
            best, second = logits.topk(2).values.tolist()
            between = None if one is None or other is None else float(logits[one] - logits[other])
            return Divergence(position, one, other, best - second, between)
    return None
