"""Captured steps: the whole step has constant shapes and runs on the device, captured once as a CUDA graph.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to launch it. Where all shapes
are known in advance, a step can be one CUDA graph: draft trees, mask, forward pass over fixed slots, acceptance, and
the move of the accepted slots (docs/how-it-works.md). Captured steps are the default on CUDA (`fast="auto"`), where the
common shapes are captured when a model is accelerated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..loop.state import BatchState, Sequence, TokenSelector
from ..loop.stats import Stats
from ..loop.step import Stepper, TreeStepper, decode
from ..model.tree_model import TreeModel
from ..trees.draft import Step

if TYPE_CHECKING:
    from .runner import StepRunner


class NoFastPathError(ValueError):
    """`fast=True` was given where steps cannot be captured."""


class Stepping(NamedTuple):
    """Captured or eager steps of one run."""

    kind: str
    """Name under which their costs are kept; empty for eager steps."""
    stepper: Callable[[BatchState], Stepper]
    """Makes the stepper."""


Way = Callable[[TreeModel, list[Sequence], list[TokenSelector], Drafter, Cache], AbstractContextManager[Stepping]]
"""A context manager for the length of a run; its value says how steps are made."""


Fast = bool | Literal["auto"]
"""Whether steps are captured: with True always or an error, with "auto" on CUDA where possible."""
FAST: dict[str, Fast] = {"auto": "auto", "on": True, "off": False}
"""Values of the command-line option."""


def way_of(fast: Fast) -> Way:
    """Return how calls make their steps; raises ValueError for anything but True, False and "auto"."""
    if fast == "auto":
        return captured_where_possible
    if not isinstance(fast, bool):
        raise ValueError(f'fast must be True, False or "auto", got {fast!r}')
    return captured if fast else ordinary


def decoded(
    way: Way,
    target: TreeModel,
    sequences: list[Sequence],
    selectors: list[TokenSelector],
    drafter: Drafter,
    cache: Cache,
    stats: Stats,
    **options: Any,
) -> Generator[list[Step]]:
    """Yield the steps of `decode`, with its options, made as `way` says; other threads' calls wait where a forward pass
    changes the model.
    """
    run = target, sequences, selectors, drafter, cache
    with target.alone(), way(*run) as (kind, stepper):
        options |= {"stepper": stepper, "kind": kind}
        with closing(decode(target, sequences, drafter, selectors, cache, stats, **options)) as passes:
            yield from passes


@contextmanager
def ordinary(target: TreeModel, *run: object) -> Iterator[Stepping]:
    """Make eager steps."""
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
            reason = "this thread has another call of the model under way"
    if reason is not None:
        raise NoFastPathError(f"fast=True: {reason}")
    with _taken(runner) as stepping:
        yield stepping


@contextmanager
def captured_where_possible(
    target: TreeModel, sequences: list[Sequence], selectors: list[TokenSelector], drafter: Drafter, cache: Cache
) -> Iterator[Stepping]:
    """Make captured steps on CUDA where they hold, else ordinary ones."""
    way = captured_or_ordinary if target.device.type == "cuda" else ordinary
    with way(target, sequences, selectors, drafter, cache) as stepping:
        yield stepping


@contextmanager
def captured_or_ordinary(
    target: TreeModel, sequences: list[Sequence], selectors: list[TokenSelector], drafter: Drafter, cache: Cache
) -> Iterator[Stepping]:
    """Make captured steps; ordinary ones where these do not hold, with one warning for each reason, and while another
    call of the model makes captured ones.
    """
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


def capture_common(target: TreeModel, drafter: Drafter, way: Way) -> None:
    """Capture the common shapes of greedy steps now, with a progress bar, so that no call waits for them. Does nothing
    without CUDA. Raises NoFastPathError where `way` is `captured` and captured steps do not hold for the model.
    """
    if way is captured:
        runner = runner_of(target)
    elif way is captured_where_possible and target.device.type == "cuda":
        from .support import runner_or_reason

        found = runner_or_reason(target)
        if isinstance(found, str):
            return  # the first call says so
        runner = found
    else:
        return
    if drafter.traits.begins_anew or not runner.take():
        return
    try:
        states = drafter.traits.layers_read(target.config.num_hidden_layers)
        runner.capture_common(target, drafter.traits.top_k, states)
    finally:
        runner.give_back()


def runner_of(target: TreeModel) -> StepRunner:
    """Return what runs the captured steps of a model; raises NoFastPathError where they do not hold for it."""
    from .support import runner_or_reason

    found = runner_or_reason(target)
    if isinstance(found, str):
        raise NoFastPathError(f"fast=True: {found}")
    return found
