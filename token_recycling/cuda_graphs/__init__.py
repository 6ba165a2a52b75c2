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
from typing import TYPE_CHECKING, NamedTuple

from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..loop.run import Run
from ..loop.step import Stepper, TreeStepper
from ..loop.text import Sequence, TokenSelector
from ..model.tree_model import TreeModel

if TYPE_CHECKING:
    from .runner import StepRunner


class NoFastPathError(ValueError):
    """Fast steps were asked for where they do not hold."""


class Stepping(NamedTuple):
    """How the steps of a run are made."""

    kind: str
    """Their name where what they take is kept; empty for the ordinary way."""
    stepper: Callable[[Run], Stepper]
    """What makes them."""


Way = Callable[[TreeModel, list[Sequence], list[TokenSelector], Drafter, Cache], AbstractContextManager[Stepping]]
"""Says for the length of a run how its steps are made."""


def way_of(fast: bool) -> Way:
    """Captured steps if `fast`, else the ordinary ones; raises ValueError for anything but True and False."""
    if not isinstance(fast, bool):
        raise ValueError(f"expected fast to be True or False, got {fast!r}")
    return captured if fast else ordinary


@contextmanager
def ordinary(target: TreeModel, *run: object) -> Iterator[Stepping]:
    """Make the steps of a run one operation after the other."""
    yield Stepping("", TreeStepper)


@contextmanager
def captured(
    target: TreeModel, sequences: list[Sequence], selectors: list[TokenSelector], drafter: Drafter, cache: Cache
) -> Iterator[Stepping]:
    """Make the steps of a run of constant shapes, captured where there is CUDA. There are slots for one text: another
    thread's is waited for. Raises NoFastPathError where such steps do not hold.
    """
    from .stepper import CapturedStepper
    from .support import why_not

    runner, reason = runner_of(target), why_not(sequences, selectors, drafter, cache)
    while reason is None and not runner.take():
        if runner.wait():
            runner = runner_of(target)  # meanwhile the model may have changed
        else:
            reason = "expected one text of the model at a time, got another one under way"
    if reason is not None:
        raise NoFastPathError(f"fast=True: {reason}")
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
