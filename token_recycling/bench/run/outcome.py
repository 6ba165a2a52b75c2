"""What one call of a method gave, and the clock that calls are timed with."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..._util.device import synchronize
from ...loop.stats import Stats


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

    @property
    def first_tokens(self) -> int:
        """Tokens that the first forward pass emitted: one of each sequence, or more where it verified a draft."""
        if self.stats is not None:
            return self.stats.first_tokens
        return sum(map(bool, self.tokens)) if self.lengths is None else sum(self.lengths[:1])

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first forward pass by the seconds of decoding; 0 where there are none."""
        tokens = sum(map(len, self.tokens)) - self.first_tokens
        return tokens / self.seconds if tokens > 0 else 0.0


class Stopwatch:
    """The time since it was made, by the clock and by what this process ran for, read when the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._now()

    def read(self) -> tuple[float, float]:
        """Seconds of the clock, and of the processor."""
        seconds, used = self._now()
        return seconds - self._began[0], used - self._began[1]

    def _now(self) -> tuple[float, float]:
        synchronize(self._device)
        return time.perf_counter(), time.process_time()
