"""The outcome of one call of a method, and the clock of all calls."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ..._util.device import synchronize
from ...loop.stats import Stats


@dataclass(frozen=True)
class Outcome:
    """Outcome of one call, for one sequence or a batch."""

    prompts: list[torch.Tensor]
    """(length,) ids of each prompt."""
    tokens: list[list[int]]
    """Output tokens of each sequence."""
    lengths: list[int] | None
    """Tokens of every step, in order; None for a batch."""
    steps: int
    """Forward passes that emitted tokens, counted per sequence."""
    prefill_seconds: float
    seconds: float
    """Of decoding after the first forward pass."""
    total_seconds: float
    """Of the whole call."""
    processor_seconds: float
    """Processor time of the whole call, of all threads of this process; other processes hardly change it."""
    stats: Stats | None
    """Of our own loop; None for transformers' decoding."""

    @property
    def first_tokens(self) -> int:
        """Tokens of the first forward pass: one per sequence, or more where it verified a draft."""
        if self.stats is not None:
            return self.stats.first_tokens
        return sum(map(bool, self.tokens)) if self.lengths is None else sum(self.lengths[:1])

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first forward pass / seconds of decoding; 0 without any."""
        tokens = sum(map(len, self.tokens)) - self.first_tokens
        return tokens / self.seconds if tokens > 0 else 0.0


class Stopwatch:
    """Elapsed and processor time since it was made, read when the device has finished."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._now()

    def read(self) -> tuple[float, float]:
        """Return elapsed seconds, and processor seconds."""
        seconds, used = self._now()
        return seconds - self._began[0], used - self._began[1]

    def _now(self) -> tuple[float, float]:
        synchronize(self._device)
        return time.perf_counter(), time.process_time()
