"""Prompts of several lengths as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support import tiny

EOS = 7
"""End-of-sequence token of the `ending` model."""


def batch(lengths: list[int], seed: int, spare: int = 0) -> dict[str, torch.Tensor]:
    """Return random prompts of these lengths, left-padded with 0 to the longest plus `spare`."""
    return padded([tiny.prompt(seed * 100 + row, length)[0] for row, length in enumerate(lengths)], spare)


def padded(texts: Sequence[torch.Tensor | Sequence[int]], spare: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of texts (length,), left-padded with 0 to the longest plus `spare`."""
    width = max(map(len, texts)) + spare
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    for row, text in enumerate(texts):
        ids[row, width - len(text) :], mask[row, width - len(text) :] = torch.as_tensor(text), 1
    return {"input_ids": ids, "attention_mask": mask}


def next_turn(inputs: dict[str, torch.Tensor], text: torch.Tensor, seed: int, vocab_size: int = 64) -> dict[str, Any]:
    """Return the inputs of the next turn: every text (rows, length) of a batch, followed by two random tokens."""
    more = torch.cat([tiny.prompt(seed * 10 + row, 2, vocab_size) for row in range(len(text))]).to(text.device)
    mask = inputs["attention_mask"].new_ones(len(text), text.shape[1] + 2)
    mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    return {"input_ids": torch.cat([text, more], dim=1), "attention_mask": mask}
