"""Prompts of several lengths as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from support import tiny

EOS = 7
"""What the texts of the `ending` model end with."""


def batch(lengths: list[int], seed: int, spare: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of these lengths, padded on the left with 0 to the longest and `spare` more."""
    return padded([tiny.prompt(seed * 100 + row, length)[0] for row, length in enumerate(lengths)], spare)


def padded(texts: Sequence[torch.Tensor | Sequence[int]], spare: int = 0) -> dict[str, torch.Tensor]:
    """Texts (length,) padded on the left with 0 to the longest and `spare` more."""
    width = max(map(len, texts)) + spare
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = torch.as_tensor(text), 1
    return {"input_ids": ids, "attention_mask": mask}
