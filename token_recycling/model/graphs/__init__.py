"""Captured forward passes: of constant shapes, captured once as CUDA graphs and replayed.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to launch it. A graph is one
launch. It holds for one number of sequences, of rows and of slots, so that a model has one for each of the few shapes
that occur (docs/how-it-works.md). Everything else of a step, from the draft to what is learned, is that of eager steps;
on the device it is launched while the graph runs. Captured passes are the default on CUDA (`fast="auto"`), where the
common shapes are captured when a model is accelerated. `backend.Backend` chooses between these and eager passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..kv_cache import TreeCache
from ..runner import NoFastPathError, States
from ..target import Target
from .passes import CapturedPasses
from .support import passes_or_reason, why_not


@contextmanager
def captured(
    target: Target, cache: TreeCache | None, reproducible: bool, suspends: bool, falls_back: bool
) -> Iterator[CapturedPasses | None]:
    """Give a run passes of constant shapes, captured where there is CUDA; for the arguments see `backend.Backend`.
    Where such passes do not hold, raise NoFastPathError, or if it `falls_back`, give None, with one warning for each
    reason.
    """
    passes = why_not(cache, reproducible) or passes_or_reason(target)
    if not falls_back:
        passes = _waited_for(target, passes, suspends)
    elif isinstance(passes, str):
        target.kept.say_once(f"forward passes are not captured as CUDA graphs: {passes}")
    if isinstance(passes, str) or (falls_back and not passes.take(suspends)):
        yield None
        return
    try:
        yield passes
    finally:
        passes.give_back()


def _waited_for(target: Target, passes: CapturedPasses | str, suspends: bool) -> CapturedPasses:
    """Take passes for a call. A model has slots for one: that of another thread is waited for, unless it suspends."""
    while not isinstance(passes, str) and not passes.take(suspends):
        if passes.wait():
            passes = passes_or_reason(target)  # meanwhile the model may have changed
        else:
            passes = "this thread has another call of the model under way, or a stream of it has not ended; close it"
    if isinstance(passes, str):
        raise NoFastPathError(f"fast=True: {passes}")
    return passes


def capture_common(target: Target, required: bool, states: States | None, sequences: int, reproducible: bool) -> None:
    """Capture the common shapes of passes over up to `sequences` sequences, those that read hidden `states` if drafters
    need some, with a progress bar. Where captured passes do not hold for the model, raise NoFastPathError if they are
    `required`; else the first call says so.
    """
    passes = passes_of(target) if required else passes_or_reason(target)
    if isinstance(passes, str) or reproducible or not passes.take():
        return
    try:
        numbers = () if states is None else tuple(states(target.config.num_hidden_layers))
        passes.capture_common(target, sequences, numbers)
    finally:
        passes.give_back()


def passes_of(target: Target) -> CapturedPasses:
    """Return the captured passes of a model; raises NoFastPathError where they do not hold for it."""
    passes = passes_or_reason(target)
    if isinstance(passes, str):
        raise NoFastPathError(f"fast=True: {passes}")
    return passes
