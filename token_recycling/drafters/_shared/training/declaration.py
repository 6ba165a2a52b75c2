"""Declaration of a training; `token-recycling train NAME` is made from it.

A drafter with a trained part has two files in its folder. `train_options.py` has one subclass of `Training`; it imports
only this file, so that help and usage errors come at once. `train.py` has the function `train(options, run)`, which
does the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...._util.options import option as option  # for files of options, which import nothing but this one

if TYPE_CHECKING:
    from ....model.tree_model import TreeModel
    from .continuations import Continuations


@dataclass(frozen=True)
class TextOptions:
    """Options for generating the target's outputs."""

    texts: int = option(3000, "Most outputs to generate.", min=2)
    prompt_tokens: int = option(64, "Prompt tokens of each output, from FILES.", min=1)
    text_tokens: int = option(128, "Most new tokens of an output.", min=2)
    temperature: float = option(0.0, "Sampling temperature of the outputs; 0 is greedy.", min=0)
    seed: int = option(0, "Random seed.", min=0)


@dataclass(frozen=True)
class Schedule:
    """Number of training steps and their learning rates."""

    steps: int = option(1000, "Batches to train on.", min=1)
    rate: float = option(3e-3, "Highest learning rate.")
    warmup: float = 0.05
    """Share of the steps in which the rate rises to its maximum."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of a gradient; larger ones are scaled down."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.rate > 0 or not 0 <= self.warmup < 1 or not self.clip > 0:
            raise ValueError(
                "steps must be >= 1, rate and clip > 0, and warmup >= 0 and < 1, "
                f"got steps={self.steps}, rate={self.rate}, clip={self.clip}, warmup={self.warmup}"
            )

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warm = self.warmup * self.steps
        if step < warm:
            return self.rate * (step + 1) / (warm + 1)
        return self.rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / (self.steps - warm)))


@dataclass(frozen=True)
class TrainingRun:
    """Inputs of a training."""

    target: TreeModel
    draft: TreeModel | None
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


@dataclass(frozen=True)
class Training:
    """Base of the trainings: its docstring is the help of the command, its `option` fields are its options."""

    needs_draft: ClassVar[bool] = False
    """Whether the part belongs to a draft model, which the command then takes as an option."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of shared options that differ for this method."""
    held_out_use: ClassVar[str]
    """Use of the held-out outputs, for the help of `--held-out`."""
