"""What the trainings of drafters share: options, inputs and results.

Each training is one file: a subclass of `Training`, the options, and the function `train(options, run)`, which does the
work. The commands are in `cli/commands/train.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..model.target import Target
    from .continuations import Continuations


@dataclass(frozen=True)
class TextOptions:
    """Options for generating the target's outputs."""

    texts: int = 3000
    """Maximum number of outputs."""
    prompt_tokens: int = 64
    """Prompt tokens of each output."""
    text_tokens: int = 128
    """Maximum number of new tokens of an output."""
    temperature: float = 0.0
    """Sampling temperature of the outputs; 0 is greedy."""
    seed: int = 0


_WARMUP = 0.05
"""Share of the steps in which the learning rate rises to its maximum."""


@dataclass(frozen=True)
class Schedule:
    """Number of training steps and their learning rates."""

    steps: int = 1000
    """Batches to train on."""
    rate: float = 3e-3
    """Highest learning rate."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.rate > 0:
            raise ValueError(f"steps must be >= 1 and rate > 0, got steps={self.steps}, rate={self.rate}")

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = _WARMUP * self.steps
        if step < warm:
            return self.rate * (step + 1) / (warm + 1)
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm)))


@dataclass(frozen=True)
class TrainingRun:
    """Inputs of a training."""

    target: Target
    draft: Target | None
    """The draft model, if the training needs one."""
    texts: Continuations
    """Training data."""
    held_out: Continuations
    """Data to measure on."""
    schedule: Schedule
    checkpoint: Path
    folder: Path
    """Where the part is saved."""
    facts: Mapping[str, Any]
    """How it is trained, saved with the part."""
    progress: Callable[[str], AbstractContextManager[Callable[..., None]]]
    """Opens a progress bar; the function it gives is called with the amount done, the total and perhaps the loss."""


@dataclass(frozen=True)
class Trained:
    """Measurements of a part that was trained and saved, and how to show them."""

    measured: Mapping[str, Any]
    """JSON values, printed by `--json`."""
    title: str
    """A line above the table."""
    headings: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    """Texts, and shares from 0 to 1, shown in percent."""
    calibration: Sequence[tuple[int, float, float]] = ()
    """For a plot: number of tokens, mean prediction and mean outcome of each bin of predictions."""
    rejection_weight: float = 1.0
    """Weight of rejections in the loss of these predictions."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of all trainings; each adds its own, and may have another size of batch."""

    batch: int = 4
    """Outputs per batch."""
    seed: int = 0
    """Random seed."""
