"""Declares the training of a method; `token-recycling train NAME` is made from it.

A drafter with a trained part has two files in its folder. `train_options.py` holds one subclass of `Training`; it
imports nothing but this file, so that help and wrong usage answer at once. `train.py` has the function
`train(options, run)`, which does the work.
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
    """Options for making the target's texts."""

    texts: int = option(3000, "Texts that the target writes, at most.", min=2)
    prompt_tokens: int = option(64, "Tokens of FILES before each text.", min=1)
    text_tokens: int = option(128, "Tokens that the target adds, at most.", min=2)
    temperature: float = option(0.0, "At which the texts are drawn; 0: greedily.", min=0)
    seed: int = option(0, "Of all that is drawn.", min=0)


@dataclass(frozen=True)
class Schedule:
    """Number of training steps, and their learning rates."""

    steps: int = option(1000, "Batches to train on.", min=1)
    rate: float = option(3e-3, "Highest learning rate.")
    warmup: float = 0.05
    """Share of the steps in which the rate rises to its highest."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of a gradient; a larger one is scaled down to it."""

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
    """The draft model where the training needs one."""
    texts: Continuations
    """To learn from."""
    held_out: Continuations
    """To measure on."""
    schedule: Schedule
    checkpoint: Path
    folder: Path
    """Where the part is saved."""
    facts: Mapping[str, Any]
    """How it is trained, to be saved with the part."""
    progress: Callable[[str], AbstractContextManager[Callable[..., None]]]
    """Opens a stage of the work; what it gives is called with the amount done, the total and perhaps the loss."""


@dataclass(frozen=True)
class Trained:
    """Measurements of a part that has been trained and saved, and how to show them."""

    measured: Mapping[str, Any]
    """As JSON holds it; `--json` prints it."""
    title: str
    """A line above the table."""
    headings: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    """Of texts, and of shares from 0 to 1, which are shown in percent."""
    calibration: Sequence[tuple[int, float, float]] = ()
    """To be plotted: number of tokens, mean prediction and mean outcome of each bin of predictions."""
    rejection_weight: float = 1.0
    """In the loss of the calibrated predictions."""


@dataclass(frozen=True)
class Training:
    """Base of the trainings: its docstring is the help of the command, its `option` fields are the method's."""

    needs_draft: ClassVar[bool] = False
    """Whether the part belongs to a draft model, which is then an option of the command."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """The command's defaults of shared options, where this method has its own."""
    held_out_use: ClassVar[str]
    """What the texts held out are for, in the help of their share."""
