"""The fast path: the whole step on the device, of constant shapes, captured once and replayed.

On a data-centre accelerator the forward pass of a step takes less time than Python needs to ask for it. So where
everything can be known beforehand, a step is one CUDA graph: the tree's tokens (or retrieval itself), the mask, the
forward pass over slots of fixed places, acceptance, and the move of the accepted slots. docs/fast-path.md says where it
holds and what a step consists of. Everything else, and every other machine, goes the ordinary way, which says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from transformers.cache_utils import Cache

from ..drafting import Drafter
from ..passes import OrdinaryPasses, Passes, Run
from ..target import Target
from ..text import Chooser, Text

if TYPE_CHECKING:
    from .steps import Steps

Fast = bool | Literal["auto", "compiled", "flex"]
"""auto: fast steps where they hold and pay, which is on CUDA; True: fast steps on any device; compiled: the same, put
through torch.compile; flex: the latter with flex_attention; False: the ordinary way.
"""


class NoFastPathError(ValueError):
    """Fast steps were asked for where they do not hold."""


def checked(fast: Fast) -> Fast:
    """`fast` if it is one of those that there are; raises ValueError."""
    if not isinstance(fast, bool) and fast not in ("auto", "compiled", "flex"):
        raise ValueError(f"expected fast to be 'auto', True, False, 'compiled' or 'flex', got {fast!r}")
    return fast


def why_not_by_itself(device: torch.device) -> str | None:
    """Why `auto` keeps to the ordinary way on a device, or None."""
    if device.type == "cuda" and torch.cuda.is_available():
        return None
    return f"expected a CUDA device, which replays a step without the host, got {device.type}"


def steps_of(target: Target, fast: Fast) -> Steps | str:
    """The fast steps of a model, which are its `target.steps` from now on, or why there are none. Raises
    NoFastPathError instead where they were insisted on; `fast` is not False.
    """
    from .support import found

    reason = why_not_by_itself(target.device) if fast == "auto" else None
    steps = found(target, fast if fast in ("compiled", "flex") else "captured") if reason is None else reason
    if not isinstance(steps, str):
        target.steps = steps
    elif fast != "auto":
        raise NoFastPathError(f"fast={fast!r}: {steps}")
    return steps


@contextmanager
def chosen(
    fast: Fast,
    target: Target,
    texts: Sequence[Text],
    choosers: Sequence[Chooser],
    drafter: Drafter,
    cache: Cache,
) -> Iterator[Callable[[Run], Passes]]:
    """Which way the passes of a run are made, for the length of the run: fast steps have slots for one text. Raises
    NoFastPathError where they were insisted on and do not hold.
    """
    if not checked(fast):
        yield OrdinaryPasses
        return
    from .passes import FastPasses
    from .support import why_not

    steps = steps_of(target, fast)
    reason = steps if isinstance(steps, str) else why_not(texts, choosers, drafter, cache)
    if reason is None and not steps.free.acquire(blocking=False):  # type: ignore[union-attr]
        reason = "expected one text of the model at a time, got another one under way"
    if isinstance(steps, str) or reason is not None:
        target.steps = None
        if fast != "auto":
            raise NoFastPathError(f"fast={fast!r}: {reason}")
        yield lambda run: OrdinaryPasses(run, reason or "")
        return

    def made(run: Run) -> Passes:
        try:
            return FastPasses(run, steps)
        except torch.OutOfMemoryError:
            if fast != "auto":
                raise
            return OrdinaryPasses(run, "expected memory for slots of fixed places, got too little")

    try:
        yield made
    finally:
        steps.free.release()
