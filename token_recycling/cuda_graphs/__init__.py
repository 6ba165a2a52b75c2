"""Steps of constant shapes: the whole step on the device, captured once as a CUDA graph and replayed.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to ask for it. So where
everything can be known beforehand, a step can be one CUDA graph: drafting, mask, forward pass over slots of fixed
places, acceptance, and the move of the accepted slots. docs/fast-path.md says where it holds. Such steps are made only
where they are asked for (`fast=True`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..loop.state import BatchState, Sequence, TokenSelector
from ..loop.step import Stepper, TreeStepper
from ..model.tree_model import TreeModel

if TYPE_CHECKING:
    from .runner import StepRunner


class NoFastPathError(ValueError):
    """Fast steps were asked for where they do not hold."""


class Stepping(NamedTuple):
    """How the steps of a run are made."""

    kind: str
    """Their name where what they take is kept; empty for the ordinary way."""
    stepper: Callable[[BatchState], Stepper]
    """What makes them."""


Way = Callable[[TreeModel, list[Sequence], list[TokenSelector], Drafter, Cache], AbstractContextManager[Stepping]]
"""Says for the length of a run how its steps are made."""


Fast = bool | Literal["auto"]
"""Whether steps are captured: with True always or an error, with "auto" on CUDA where possible."""


def way_of(fast: Fast) -> Way:
    """How the steps of calls are made; raises ValueError for anything but True, False and "auto"."""
    if fast == "auto":
        return captured_where_possible
    if not isinstance(fast, bool):
        raise ValueError(f'fast must be True, False or "auto", got {fast!r}')
    return captured if fast else ordinary


@contextmanager
def ordinary(target: TreeModel, *run: object) -> Iterator[Stepping]:
    """Make the steps of a run one operation after the other."""
    yield Stepping("", TreeStepper)


@contextmanager
def captured(
    target: TreeModel, sequences: list[Sequence], selectors: list[TokenSelector], drafter: Drafter, cache: Cache
) -> Iterator[Stepping]:
    """Make the steps of a run of constant shapes, captured where there is CUDA. A model has slots for one call: that of
    another thread is waited for. Raises NoFastPathError where such steps do not hold.
    """
    from .support import why_not

    runner, reason = runner_of(target), why_not(sequences, selectors, drafter, cache)
    while reason is None and not runner.take():
        if runner.wait():
            runner = runner_of(target)  # meanwhile the model may have changed
        else:
            reason = "expected one call of the model at a time, got another one under way"
    if reason is not None:
        raise NoFastPathError(f"fast=True: {reason}")
    with _taken(runner) as stepping:
        yield stepping


@contextmanager
def captured_where_possible(
    target: TreeModel, sequences: list[Sequence], selectors: list[TokenSelector], drafter: Drafter, cache: Cache
) -> Iterator[Stepping]:
    """Make captured steps on CUDA, ordinary ones where these do not hold, with one warning for each reason, and while
    another call of the model makes captured ones.
    """
    if target.device.type != "cuda":
        yield Stepping("", TreeStepper)
        return
    from .support import runner_or_reason, why_not

    reason = why_not(sequences, selectors, drafter, cache)
    found = reason if reason is not None else runner_or_reason(target)
    if isinstance(found, str):
        target.kept.say_once(f"steps are not captured as CUDA graphs: {found}")
    if isinstance(found, str) or not found.take():
        yield Stepping("", TreeStepper)
        return
    with _taken(found) as stepping:
        yield stepping


@contextmanager
def _taken(runner: StepRunner) -> Iterator[Stepping]:
    """Captured steps of a runner that was taken, which is given back afterwards."""
    from .stepper import CapturedStepper

    try:
        yield Stepping("captured", partial(CapturedStepper, runner=runner))
    finally:
        runner.give_back()


def runner_of(target: TreeModel) -> StepRunner:
    """Return what runs the captured steps of a model; raises NoFastPathError where they do not hold for it."""
    from .support import runner_or_reason

    found = runner_or_reason(target)
    if isinstance(found, str):
        raise NoFastPathError(f"fast=True: {found}")
    return found
