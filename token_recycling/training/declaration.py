"""Options, inputs and results shared by all trainings of drafters.

Each training is one file with a function `train(options, run)`. Its options are declared here, as a subclass of
`Training`: the command line derives its own from the fields, and imports torch only when training starts. The commands
are in `cli/commands/train.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._util.options import option

if TYPE_CHECKING:
    from ..model.target import Target
    from .continuations import Continuations


@dataclass(frozen=True)
class TextOptions:
    """Options for the target's outputs that a part is trained on."""

    texts: int = option(3000, "Maximum number of outputs to generate.", min=2)
    prompt_tokens: int = option(64, "Prompt tokens per output, from FILES.", min=1)
    text_tokens: int = option(128, "Maximum new tokens per output.", min=2)
    temperature: float = option(0.0, "Sampling temperature of the outputs; 0 is greedy.", min=0)
    held_out: float = option(0.0625, "Fraction of the outputs held out for measurement.")

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be > 0 and < 1, got {self.held_out}")


_WARMUP = 0.05
"""Fraction of the steps in which the learning rate rises to its maximum."""


@dataclass(frozen=True)
class Schedule:
    """Number of training steps and their learning rates."""

    steps: int = option(1000, "Batches to train on.", min=1)
    rate: float = option(3e-3, "Maximum learning rate.")

    def __post_init__(self) -> None:
        if self.steps < 1 or not self.rate > 0:
            raise ValueError(f"steps must be >= 1 and rate > 0, got steps={self.steps}, rate={self.rate}")

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
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
    """Held-out data for measurement."""
    schedule: Schedule
    checkpoint: Path
    folder: Path
    """Folder to save the part in."""
    facts: Mapping[str, Any]
    """Facts about the training, saved with the part."""
    progress: Callable[[str], AbstractContextManager[Callable[..., None]]]
    """Opens a progress bar; its function is called with the amount done, the total and optionally the loss."""


@dataclass(frozen=True)
class Trained:
    """Measurements of a trained and saved part, and how to show them."""

    measured: Mapping[str, Any]
    """JSON values, printed by `--json`."""
    title: str
    """A line above the table."""
    headings: tuple[str, ...]
    rows: list[tuple[str | float, ...]]
    """Cells: text, or shares from 0 to 1 that are shown in percent."""
    calibration: Sequence[tuple[int, float, float]] = ()
    """For a plot: number of tokens, mean prediction and mean outcome per bin of predictions."""
    rejection_weight: float = 1.0
    """Weight of rejections in the loss of these predictions."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Options of all trainings; subclasses add their own, and may change the default batch size."""

    batch: int = option(4, "Outputs per batch.", min=1)
    seed: int = option(0, "Random seed.", min=0)


@dataclass(frozen=True, kw_only=True)
class EagleTraining(Training):
    """An EAGLE head."""

    version: int = option(3, "1: predicts hidden states (EAGLE-1 and -2); 3: predicts tokens (EAGLE-3).", min=1)
    vocabulary: int = option(32000, "Tokens that a version 3 head can predict: the most frequent ones.", min=1)
    intermediate: int = option(0, "Width of the layer's feed-forward network; 0: as in the target.", min=0)
    unrolled: int = option(0, "Passes over its own outputs, each one token deeper; 0: as published, 1 or 7.", min=0)

    def __post_init__(self) -> None:
        if self.version not in (1, 3):
            raise ValueError(f"version must be 1 or 3, got {self.version}")

    @property
    def passes(self) -> int:
        """Passes of the head over a batch, the first one over the target's states."""
        return self.unrolled or (1 if self.version == 1 else 7)


@dataclass(frozen=True, kw_only=True)
class MedusaTraining(Training):
    """Medusa heads."""

    heads: int = option(4, "Number of heads, each predicting one token further ahead.", min=1)
    blocks: int = option(1, "Residual blocks per head.", min=1)
    own_output: bool = option(False, "A separate output layer per head, as in the paper: large.")
    batch: int = option(2, "Outputs per batch.", min=1)


@dataclass(frozen=True, kw_only=True)
class SpecDecTraining(Training):
    """A head that predicts rejections; depth, weight and share default to the values that the paper recommends."""

    depth: int = option(3, "Residual blocks.", min=0)
    rejection_weight: float = option(6.0, "Weight of a rejection relative to an acceptance.")
    target_share: float = option(0.15, "Fraction of the target's own tokens in the sequences that the head reads.")
    draft_temperature: float = option(1.0, "Sampling temperature of the draft model; 0: greedy decoding.", min=0)
    batch: int = option(16, "Outputs per batch.", min=1)

    def __post_init__(self) -> None:
        if self.depth < 0 or self.draft_temperature < 0:
            raise ValueError(f"depth and draft_temperature must be >= 0, got {self.depth} and {self.draft_temperature}")
        if not self.rejection_weight > 0 or not 0 <= self.target_share < 1:
            raise ValueError(
                "rejection_weight must be > 0 and target_share from 0 to less than 1, "
                f"got {self.rejection_weight} and {self.target_share}"
            )
