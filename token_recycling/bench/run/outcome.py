"""What one call of a method gave, and the wait for a device that every clock needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...stats import Stats
from ...tree import RankPath


@dataclass(frozen=True)
class Outcome:
    """What one call of a method gave, for one text or a batch."""

    prompts: list[torch.Tensor]
    """(length,) ids of each text's prompt."""
    tokens: list[list[int]]
    """Emitted tokens of each text."""
    lengths: list[int] | None
    """Tokens of every step, in order; None for a batch."""
    steps: int
    """Forward passes that emitted tokens, counted for every text of a batch."""
    prefill_seconds: float
    seconds: float
    """Of the steps alone."""
    total_seconds: float
    """Of the whole call."""
    stats: Stats | None
    """Of our own loop."""
    paths: dict[RankPath, tuple[int, int]] | None = None
    """Nodes whose parent was accepted, and accepted nodes, by rank path; counted in replay."""


def wait(device: torch.device) -> None:
    """Until everything that was asked of the device is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
