"""What one call of a method gave, and the clock that calls are timed with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ...stats import Stats, synchronize
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
    processor_seconds: float
    """Of the whole call, that this process ran for, all its threads together: other work on the machine adds little."""
    stats: Stats | None
    """Of our own loop."""
    paths: dict[RankPath, tuple[int, int]] | None = None
    """Nodes whose parent was accepted, and accepted nodes, by rank path; counted in replay."""


def now(device: torch.device) -> float:
    """Seconds of a clock, read when the device has finished its work."""
    synchronize(device)
    return time.perf_counter()
