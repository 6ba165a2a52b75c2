"""Captured steps: the whole step has constant shapes and runs on the device, captured once as a CUDA graph.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to launch it. Where all shapes
are known in advance, a step can be one CUDA graph: draft trees, mask, forward pass over fixed slots, acceptance, and
the move of the accepted slots (docs/how-it-works.md). Captured steps are the default on CUDA (`fast="auto"`), where the
common shapes are captured when a model is accelerated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from transformers.cache_utils import Cache

from ..drafters._base import Drafter
from ..loop.state import Sequence, TokenSelector
from ..loop.step import Backend, StepBackend, TreeStepper
from ..model.tree_model import TreeModel

if TYPE_CHECKING:
    from .runner import StepRunner


class NoFastPathError(ValueError):
    """`fast=True` was given where steps cannot be captured."""


Fast = bool | Literal["auto"]
"""Whether steps are captured: with True always or an error, with "auto" on CUDA where possible."""
FAST: dict[str, Fast] = {"auto": "auto", "on": True, "off": False}
"""Values of the command-line option."""


def backend_for(fast: Fast) -> Backend:
    """Return the backend of calls; raises ValueError for anything but True, False and "auto"."""
    if fast == "auto":
        return captured_where_possible
    if not isinstance(fast, bool):
        raise ValueError(f'fast must be True, False or "auto", got {fast!r}')
    return captured if fast else eager


@contextmanager
def eager(target: TreeModel, *run: object) -> Iterator[StepBackend]:
    """Make eager steps."""
    yield StepBackend("", TreeStepper)


@contextmanager
def captured(
    target: TreeModel, sequences: list[Sequence], selectors: list[TokenSelector], drafter: Drafter, cache: Cache
) -> Iterator[StepBackend]:
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
) -> Iterator[StepBackend]:
    """Make captured steps on CUDA where they hold, else eager ones."""
    backend = captured_or_eager if target.device.type == "cuda" else eager
    with backend(target, sequences, selectors, drafter, cache) as stepping:
        yield stepping


@contextmanager
def captured_or_eager(
    target: TreeModel, sequences: list[Sequence], selectors: list[TokenSelector], drafter: Drafter, cache: Cache
) -> Iterator[StepBackend]:
    """Make captured steps; eager ones where these do not hold, with one warning for each reason, and while another
    call of the model makes captured ones.
    """
    from .support import runner_or_reason, why_not

    reason = why_not(sequences, selectors, drafter, cache)
    found = reason if reason is not None else runner_or_reason(target)
    if isinstance(found, str):
        target.kept.say_once(f"steps are not captured as CUDA graphs: {found}")
    if isinstance(found, str) or not found.take():
        yield StepBackend("", TreeStepper)
        return
    with _taken(found) as stepping:
        yield stepping


@contextmanager
def _taken(runner: StepRunner) -> Iterator[StepBackend]:
    """Captured steps of a runner that was taken, which is given back afterwards."""
    from .stepper import CapturedStepper

    try:
        yield StepBackend("captured", partial(CapturedStepper, runner=runner))
    finally:
        runner.give_back()


def capture_common(target: TreeModel, drafter: Drafter, backend: Backend) -> None:
    """Capture the common shapes of greedy steps now, with a progress bar, so that no call waits for them. Does nothing
    without CUDA. Raises NoFastPathError where `backend` is `captured` and captured steps do not hold for the model.
    """
    if backend is captured:
        runner = runner_of(target)
    elif backend is captured_where_possible and target.device.type == "cuda":
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
