"""Captured forward passes: of constant shapes, captured once as CUDA graphs and replayed.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to launch it. A graph is one
launch. It holds for one number of sequences, of rows and of slots, so that a model has one for each of the few shapes
that occur (docs/how-it-works.md). Everything else of a step, from the draft to what is learned, is that of eager steps;
on the device it is launched while the graph runs. Captured passes are the default on CUDA (`fast="auto"`), where the
common shapes are captured when a model is accelerated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from ..kv_cache import TreeCache
from ..runner import Backend, EagerRunners, Runners, States, eager
from ..target import Target

if TYPE_CHECKING:
    from .passes import CapturedPasses


class NoFastPathError(ValueError):
    """`fast=True` was given where forward passes cannot be captured."""


Fast = bool | Literal["auto"]
"""Whether passes are captured: with True always or an error, with "auto" on CUDA where possible."""
FAST: dict[str, Fast] = {"auto": "auto", "on": True, "off": False}
"""Values of the command-line option."""


def backend_for(fast: Fast, suspends: bool = False) -> Backend:
    """Return the backend of calls, or of those that `suspends` between steps for as long as their callers like. Raises
    ValueError for anything but True, False and "auto".
    """
    if fast != "auto" and not isinstance(fast, bool):
        raise ValueError(f'fast must be True, False or "auto", got {fast!r}')
    if not fast:
        return eager
    backend = captured_where_possible if fast == "auto" else captured
    return partial(backend, suspends=True) if suspends else backend


@contextmanager
def captured(
    target: Target, cache: TreeCache | None = None, reproducible: bool = False, suspends: bool = False
) -> Iterator[CapturedPasses]:
    """Make passes of constant shapes, captured where there is CUDA. A model has slots for one run: that of another
    thread is waited for, unless it `suspends`. Raises NoFastPathError where such passes do not hold.
    """
    from .support import why_not

    passes, reason = passes_of(target), why_not(cache, reproducible)
    while reason is None and not passes.take(suspends):
        if passes.wait():
            passes = passes_of(target)  # meanwhile the model may have changed
        else:
            reason = "this thread has another call of the model under way, or a stream of it has not ended; close it"
    if reason is not None:
        raise NoFastPathError(f"fast=True: {reason}")
    try:
        yield passes
    finally:
        passes.give_back()


def captured_where_possible(
    target: Target, cache: TreeCache | None = None, reproducible: bool = False, suspends: bool = False
) -> AbstractContextManager[Runners]:
    """Make captured passes on CUDA where they hold, else eager ones."""
    if target.device.type != "cuda":
        return eager(target, cache, reproducible)
    return captured_or_eager(target, cache, reproducible, suspends)


@contextmanager
def captured_or_eager(
    target: Target, cache: TreeCache | None = None, reproducible: bool = False, suspends: bool = False
) -> Iterator[Runners]:
    """Make captured passes; eager ones where these do not hold, with one warning for each reason, and while another
    run of the model makes captured ones.
    """
    from .support import passes_or_reason, why_not

    reason = why_not(cache, reproducible)
    passes = reason if reason is not None else passes_or_reason(target)
    if isinstance(passes, str):
        target.kept.say_once(f"forward passes are not captured as CUDA graphs: {passes}")
    if isinstance(passes, str) or not passes.take(suspends):
        yield EagerRunners()
        return
    try:
        yield passes
    finally:
        passes.give_back()


def capture_common(
    target: Target, backend: Backend, states: States | None = None, sequences: int = 1, reproducible: bool = False
) -> None:
    """Capture the common shapes of passes over up to `sequences` sequences now, those that read hidden `states` if
    drafters need some, with a progress bar, so that no call waits for them. Does nothing without CUDA. Raises
    NoFastPathError where `backend` is `captured` and captured passes do not hold for the model.
    """
    if backend is captured:
        passes = passes_of(target)
    elif backend is captured_where_possible and target.device.type == "cuda":
        from .support import passes_or_reason

        result = passes_or_reason(target)
        if isinstance(result, str):
            return  # the first call says so
        passes = result
    else:
        return
    if reproducible or not passes.take():
        return
    try:
        passes.capture_common(
            target, sequences, () if states is None else tuple(states(target.config.num_hidden_layers))
        )
    finally:
        passes.give_back()


def passes_of(target: Target) -> CapturedPasses:
    """Return the captured passes of a model; raises NoFastPathError where they do not hold for it."""
    from .support import passes_or_reason

    passes = passes_or_reason(target)
    if isinstance(passes, str):
        raise NoFastPathError(f"fast=True: {passes}")
    return passes
