"""The library inside transformers: after `accelerate(model)` the model's own `generate()` is faster.

Pipelines, streamers and servers work unchanged, and the model is saved and copied under its own name. `generate` of
this module leaves the model as it is. `acceleration` has the class whose method decodes the calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..loop.request import NO_HINTS, Hints
from ..loop.stats import Stats
from ..model.backend import Backend, Fast
from ..model.prepacking import drop, prepacked_of
from ..model.prepacking import prepack as prepack_weights
from ..model.support import ready
from ..model.target import Target
from .acceleration import Acceleration, is_accelerated, make_accelerated, make_plain, view


def accelerate(
    model: PreTrainedModel,
    /,
    drafter: str | Drafter = "recycling",
    *,
    fast: Fast = "auto",
    reproducible: bool = False,
    prepack: bool | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Make the model's own `generate()` faster, in place, and return the model.

    `fast`: "auto" captures forward passes as CUDA graphs on CUDA where possible, True always or raises, False never
    (docs/how-it-works.md). `reproducible=True` makes drafts independent of earlier calls, so that equal calls give
    equal outputs in 16 bits too (docs/exactness.md).

    On a CPU weights are prepacked for forward passes over a few rows (docs/usage.md). The copy doubles weight memory,
    and only accelerated calls use it. `prepack=None` does so where the copy takes at most a quarter of the machine's
    memory, True wherever possible, False never. Weights that change later are used unpacked; accelerate again to
    prepack them.

    `options` are passed to the drafter, which is then `model.acceleration.drafter`, with all that it learns; statistics
    of the last call are in `model.acceleration.stats`. Accelerating again replaces the drafter. A model that is pickled
    (`pickle`, `torch.save`, another process) or copied by `copy.deepcopy` comes back accelerated, with its own copy of
    the drafter; `save_pretrained` writes only the model.

    Raises UnsupportedModelError with the reason; NoFastPathError, here or in a call, if `fast=True` and steps cannot be
    captured; ValueError if `prepack=True` and weights cannot be prepacked.
    """
    acceleration = prepared(model, drafter, fast, reproducible=reproducible, **options)
    acceleration.owns_prepacked = (
        model.acceleration.owns_prepacked if is_accelerated(model) else prepacked_of(model) is None
    )
    prepack_weights(model, prepack, fixed=reproducible)
    make_accelerated(model, acceleration)
    acceleration.examine(model)
    return model


def prepared(model: PreTrainedModel, drafter: str | Drafter, fast: Fast, /, **options: Any) -> Acceleration:
    """Prepare and compile the acceleration of a model; raises as `accelerate` does."""
    backend, target = Backend(fast), ready(model)
    drafter = make_drafter(drafter, **options)
    drafter.warm_up(target.device)
    drafter.fit(target)
    traits = drafter.traits
    backend.capture_common(target, traits.states_read(target), reproducible=traits.isolates_requests)
    return Acceleration(drafter, backend, target)


def decelerate(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `accelerate`: restore the model's class and drop the weights that `accelerate` prepacked; those prepacked by
    `load` stay. A model that is not accelerated is returned unchanged.
    """
    acceleration = vars(model).get("acceleration")
    if isinstance(acceleration, Acceleration):
        if acceleration.owns_prepacked:
            drop(model)
        make_plain(model)
    return model


@contextlib.contextmanager
def accelerated(
    model: PreTrainedModel, /, drafter: str | Drafter = "recycling", *, fast: Fast = "auto", **options: Any
) -> Iterator[Acceleration]:
    """Accelerate a model within a `with` block, and restore it afterwards. Weights are neither prepacked
    nor unpacked.
    """
    before = model.acceleration if is_accelerated(model) else None
    acceleration = prepared(model, drafter, fast, **options)
    acceleration.owns_prepacked = before is not None and before.owns_prepacked
    make_accelerated(model, acceleration)
    try:
        yield model.acceleration
    finally:
        if before is not None:
            make_accelerated(model, before)
        elif is_accelerated(model):
            make_plain(model)


def generate(
    model: PreTrainedModel,
    /,
    *inputs: Any,
    drafter: str | Drafter = "recycling",
    fast: Fast = "auto",
    reproducible: bool = False,
    stats: Stats | None = None,
    prediction: str | Sequence[int] | torch.Tensor | None = None,
    **arguments: Any,
) -> Any:
    """Run one accelerated call of `model.generate(*inputs, **arguments)`: same arguments, same return value.

    `prediction` is the predicted output, as ids (n,) or as text with the `tokenizer` among the arguments. Drafts are
    taken from it first; the model never reads it. Raises ValueError if the drafter cannot use it.

    Pass the same drafter object again to keep what it learned; `fast` and `reproducible` are as in `accelerate`.
    `stats` is filled in; with `return_dict_in_generate=True` the output has them as `stats` too. Raises
    UnsupportedModelError where `accelerate` does; a call that cannot be accelerated falls back to transformers with a
    warning.
    """
    backend = Backend(fast)
    drafter, target = make_drafter(drafter, reproducible=reproducible), ready(model)
    hints = NO_HINTS if prediction is None else Hints(prediction=_predicted(prediction, drafter, target, arguments))
    acceleration = Acceleration(drafter, backend, target, hints=hints)
    acceleration.stats.synchronize = bool(stats and stats.synchronize)
    result = view(model, acceleration).generate(*inputs, **arguments)
    if stats is not None:
        vars(stats).update(vars(stats + acceleration.stats))
    return result


def _predicted(
    prediction: str | Sequence[int] | torch.Tensor, drafter: Drafter, target: Target, arguments: dict[str, Any]
) -> torch.Tensor:
    """Return a prediction as ids (n,) int64; raises ValueError."""
    if not drafter.traits.predictions:
        raise ValueError(
            f"{drafter.describe()} does not draft from predictions; use recycling, or leave prediction out"
        )
    if isinstance(prediction, str):
        if arguments.get("tokenizer") is None:
            raise ValueError("a prediction as text needs tokenizer=...; pass the tokenizer, or token ids")
        prediction = arguments["tokenizer"](prediction, add_special_tokens=False)["input_ids"]
    ids = torch.as_tensor(prediction, dtype=torch.long).flatten()
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size:
        raise ValueError(
            f"token ids of a prediction must be from 0 to {target.vocab_size - 1}, got {int(ids.min())} to "
            f"{int(ids.max())}"
        )
    return ids
