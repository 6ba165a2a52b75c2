"""Training loop of a small part with a frozen model: batch, loss, step, checkpoint; an interrupted run resumes.

Batch number i must depend on i alone, and random numbers of the loss must be seeded by its batch, so that an
interrupted run ends with the same weights. AdamW; the learning rate rises linearly and falls to zero as a cosine. Cost
beyond forward and backward: a file of three times the weights, every 20 seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from .._util.files import replacing
from .declaration import Schedule

_CLIP = 1.0
"""Maximum norm of a gradient; larger gradients are scaled down."""

Batch = TypeVar("Batch")
Part = TypeVar("Part", bound=torch.nn.Module)
_SAVE_SECONDS = 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be resumed; the message gives the reason and a remedy."""


class Shuffled:
    """The examples of each batch: all of them in random order, reshuffled in every epoch."""

    def __init__(self, examples: int, batch: int, seed: int = 0) -> None:
        if batch < 1:
            raise ValueError(f"batch must be >= 1, got {batch}")
        self._examples, self._batch, self._seed = examples, batch, seed
        self._order = lru_cache(maxsize=2)(self._order_of)

    def __getitem__(self, number: int) -> list[int]:
        places = range(number * self._batch, (number + 1) * self._batch)
        return [self._order(place // self._examples)[place % self._examples] for place in places]

    def _order_of(self, epoch: int) -> list[int]:
        draws = torch.Generator().manual_seed(self._seed + epoch)
        return torch.randperm(self._examples, generator=draws).tolist()


@dataclass(frozen=True)
class Task(Generic[Part, Batch]):
    """A part to train, with its batches and its loss."""

    part: Part
    batch_at: Callable[[int], Batch]
    """Returns a batch by its number; called without gradients."""
    loss_of: Callable[[Part, Batch], torch.Tensor]
    """Returns a scalar; a constant if the batch has nothing to learn from, so that the weights stay."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Everything else that determines the outcome, such as data and model, as JSON values."""


def fit(
    task: Task[Part, Any],
    schedule: Schedule,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> Part:
    """Train the parameters of a part that require a gradient, in place, and return it.

    With a `checkpoint` the run resumes from that file if it exists, and keeps it up to date. `progress` is called with
    the number of steps done, the total and the last loss. Raises CheckpointError for a file with other options, of
    another part, or damaged, and FloatingPointError if the loss is not finite.
    """
    part = task.part
    parameters = [parameter for parameter in part.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=schedule.rate, weight_decay=0.0)
    decided = json.loads(json.dumps({"plan": asdict(schedule), **task.options}))
    path = None if checkpoint is None else Path(checkpoint)
    done = _resume(path, part, optimizer, decided) if path is not None and path.exists() else 0
    saved_at, trained = time.monotonic(), part.training
    part.train()
    for step in range(done, schedule.steps):
        with torch.no_grad():
            batch = task.batch_at(step)
        loss = task.loss_of(part, batch)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss is {loss.item()} in step {step}; lower the rate")
        if loss.requires_grad:
            optimizer.zero_grad(set_to_none=True)
            loss.backward(inputs=parameters)  # layers shared with a frozen model get no gradients
            torch.nn.utils.clip_grad_norm_(parameters, _CLIP)
            for group in optimizer.param_groups:
                group["lr"] = schedule.rate_at(step)
            optimizer.step()
        if path is not None and (time.monotonic() - saved_at > _SAVE_SECONDS or step + 1 == schedule.steps):
            state = {"part": part.state_dict(), "optimizer": optimizer.state_dict()}
            with replacing(path) as temporary:
                torch.save({"options": decided, "step": step + 1, **state}, temporary)
            saved_at = time.monotonic()
        if progress is not None:
            progress(step + 1, schedule.steps, loss.item())
    return part.train(trained)


def _resume(path: Path, part: torch.nn.Module, optimizer: torch.optim.Optimizer, decided: dict[str, Any]) -> int:
    remedy = "delete it to start again, or use its original options"
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        options, step, weights, moments = (state[name] for name in ("options", "step", "part", "optimizer"))
    except Exception as error:  # a damaged file can fail in any way
        raise CheckpointError(f"{path}: not a readable checkpoint ({error}); {remedy}") from None
    for name in sorted(decided.keys() | options.keys()):
        if options.get(name) != decided.get(name):
            raise CheckpointError(
                f"{path}: {name} of the checkpoint must be {decided.get(name)}, got {options.get(name)}; {remedy}"
            )
    try:
        part.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: the checkpoint does not match this part ({error}); {remedy}") from None
    return int(step)
