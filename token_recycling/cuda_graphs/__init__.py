"""Steps of constant shapes: the whole step on the device, captured once as a CUDA graph and replayed.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to ask for it. So where
everything can be known beforehand, a step is one CUDA graph: the tree's tokens (or retrieval itself), the mask, the
forward pass over slots of fixed places, acceptance, and the move of the accepted slots. docs/fast-path.md says where it
holds and what a step consists of. Everything else, and every other machine, goes the ordinary way, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from transformers.cache_utils import Cache

from ..costs.curve import CostCurve
from ..drafters._base import Drafter
from ..loop.run import Run
from ..loop.step import Stepper, TreeStepper
from ..loop.text import Sequence, TokenSelector
from ..model.pass_costs import PassCosts
from ..model.tree_model import TreeModel

if TYPE_CHECKING:
    from .runner import StepRunner

Fast = bool | Literal["auto"]
"""auto: fast steps where they hold and pay, which is on CUDA; True: fast steps on any device; False: the ordinary way.
"""


class NoFastPathError(ValueError):
    """Fast steps were insisted on where they do not hold."""


class Stepping(NamedTuple):
    """How the steps of a run are made."""

    costs: PassCosts
    """What they cost."""
    stepper: Callable[[Run], Stepper]
    """What makes them."""


def checked(fast: Fast) -> Fast:
    """`fast` if it is one of those that there are; raises ValueError."""
    if not isinstance(fast, bool) and fast != "auto":
        raise ValueError(f"expected fast to be 'auto', True or False, got {fast!r}")
    return fast


def why_not_by_itself(device: torch.device) -> str | None:
    """Why `auto` keeps to the ordinary way on a device, or None."""
    if device.type == "cuda" and torch.cuda.is_available():
        return None
    return f"expected a CUDA device, which replays a step without the host, got {device.type}"


def runner_of(target: TreeModel, fast: Fast) -> StepRunner | str:
    """What runs the fast steps of a model, or why there are none. Raises NoFastPathError instead where they were
    insisted on.
    """
    if not checked(fast):
        return "expected fast='auto' or True, got False"
    from .support import runner_or_reason

    reason = why_not_by_itself(target.device) if fast == "auto" else None
    found = runner_or_reason(target) if reason is None else reason
    if isinstance(found, str) and fast != "auto":
        raise NoFastPathError(f"fast={fast!r}: {found}")
    return found


def costs_of(target: TreeModel, fast: Fast) -> PassCosts:
    """What the steps of a model cost, made in the way that `fast` says."""
    runner = runner_of(target, fast)
    return PassCosts(target) if isinstance(runner, str) else PassCosts(target, "captured", partial(_measured, target))


def _measured(target: TreeModel, length: int, seconds: float) -> CostCurve:
    """On the steps that there are by then: a drafter keeps costs from text to text, and must not keep old graphs."""
    from .timing import staircase

    runner = runner_of(target, True)
    assert not isinstance(runner, str), "insisted on, it is there or an error is raised"
    return staircase(target, runner, length, seconds)


@contextmanager
def stepping(
    fast: Fast,
    target: TreeModel,
    sequences: list[Sequence],
    selectors: list[TokenSelector],
    drafter: Drafter,
    cache: Cache,
) -> Iterator[Stepping]:
    """How the steps of a run are made, for the length of the run: fast steps have slots for one text. Raises
    NoFastPathError where they were insisted on and do not hold.
    """
    if not checked(fast):
        yield Stepping(PassCosts(target), TreeStepper)
        return
    from .stepper import CapturedStepper
    from .support import why_not

    runner = runner_of(target, fast)
    reason = runner if isinstance(runner, str) else why_not(sequences, selectors, drafter, cache)
    while not isinstance(runner, str) and reason is None and not runner.take():
        if fast != "auto" and runner.wait():
            runner = runner_of(target, fast)  # meanwhile the model may have changed
        else:
            reason = "expected one text of the model at a time, got another one under way"
    if isinstance(runner, str) or reason is not None:
        if fast != "auto":
            raise NoFastPathError(f"fast={fast!r}: {reason}")
        yield Stepping(PassCosts(target), partial(TreeStepper, reason=reason or ""))
        return

    def made(run: Run) -> Stepper:
        try:
            return CapturedStepper(run, runner)
        except torch.OutOfMemoryError:
            if fast != "auto":
                raise
            return TreeStepper(run, "expected memory for slots of fixed places, got too little")

    try:
        yield Stepping(PassCosts(target, "captured", partial(_measured, target)), made)
    finally:
        runner.give_back()
