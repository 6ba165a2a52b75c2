"""Prompts of several lengths as one batch."""

from __future__ import annotations

import torch
from support import tiny

EOS = 7
"""What the texts of the `ending` model end with."""


def batch(lengths: list[int], seed: int, spare: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the left with 0 to the longest and `spare` more."""
    width = max(lengths) + spare
    ids, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = tiny.prompt(seed * 100 + row, length)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}
