"""Measurements of one shape at one context length, one row each."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import CompileConfig
from transformers.generation.streamers import BaseStreamer

from token_recycling._util.device import synchronize
from token_recycling.model.frames import ROWS
from token_recycling.model.graphs.passes import CapturedPasses
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.target import Target
from token_recycling.trees.draft import Draft, star

from .profiled import profiled
from .rows import Row
from .timing import filled, one_step, timed

ALONE = (1, 64)
"""Numbers of nodes for which the forward pass is measured separately, and the step is profiled."""


@dataclass(frozen=True)
class Wanted:
    """Measurements to run for each shape."""

    sizes: tuple[int, ...] = ROWS
    """Numbers of nodes of captured steps."""
    compared: tuple[int, ...] = (1, 8, 16, 32, 64)
    """Numbers of nodes also measured eager, and captured with a compiled forward pass."""
    compiles: bool = True
    """Whether torch compiles; if False, the same measurements run uncompiled."""


EVERYTHING, FEW = Wanted(), Wanted((1, 8, 64), (1,), False)
_ROUNDS = 20
"""Number of forward passes measured separately."""
_GENERATED, _WARM = 24, 6
"""Tokens that `generate` emits, and how many of the first are not counted: prefill and compilation."""

Measurement = Callable[[Target, int], Row]


def measurements(shape: str, context: int, wanted: Wanted = EVERYTHING) -> Iterator[tuple[Row, Measurement]]:
    """Yield the keys of each row to measure, with the function that measures it."""
    at = {"shape": shape, "context": context}
    yield {**at, "what": "generate", "kind": "eager", "nodes": 1}, partial(_generate, config=None)
    for nodes in wanted.sizes:
        yield {**at, "what": "step", "kind": "captured", "nodes": nodes}, partial(_step, nodes=nodes)
    for nodes in wanted.compared:
        yield (
            {**at, "what": "step", "kind": "compiled", "nodes": nodes},
            partial(_compiled_step, nodes=nodes, compiles=wanted.compiles),
        )
        yield {**at, "what": "step", "kind": "eager", "nodes": nodes}, partial(_eager_step, nodes=nodes)
    for nodes in ALONE:
        yield {**at, "what": "forward", "kind": "captured", "nodes": nodes}, partial(_forward, nodes=nodes)
    yield {**at, "what": "profile", "kind": "eager", "nodes": 1}, _eager_profile
    for nodes in ALONE:
        yield {**at, "what": "profile", "kind": "captured", "nodes": nodes}, partial(_step_profile, nodes=nodes)
    yield (
        {**at, "what": "generate", "kind": "compiled", "nodes": 1},
        partial(_generate, config=CompileConfig() if wanted.compiles else None, static=True),
    )


class Arrivals(BaseStreamer):
    """Records the arrival time of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: no tokens are buffered."""


@torch.no_grad()
def _generate(target: Target, context: int, config: CompileConfig | None, static: bool = False) -> Row:
    """Return the median seconds between two tokens of transformers' own `generate`. With `static`, it uses a static
    cache, compiles the forward pass as `config` specifies, and prefills the prompt itself.
    """
    fixed = {"cache_implementation": "static", "compile_config": config}
    given: dict[str, Any] = fixed if static else {"past_key_values": filled(target, context)}
    ids, arrivals = torch.ones(1, context + 1, dtype=torch.long, device=target.device), Arrivals()
    target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_GENERATED,
        do_sample=False,
        streamer=arrivals,
        **given,
    )
    synchronize(target.device)
    gaps = np.diff(arrivals.times[_WARM:])
    return {"seconds": statistics.median(gaps.tolist())}


def _passes(target: Target) -> CapturedPasses:
    passes = passes_or_reason(target)
    if isinstance(passes, str):
        raise RuntimeError(f"no fast path: {passes}")
    return passes


def _step(target: Target, context: int, nodes: int) -> Row:
    return {"seconds": timed(target, _passes(target), context, [nodes], 2.0)[nodes]}


def _compiled_step(target: Target, context: int, nodes: int, compiles: bool) -> Row:
    """Return the seconds of a captured step with a compiled forward pass. Compiling takes up to a minute per shape."""
    passes, eager = _passes(target), target.eager
    passes._graphs.forget()
    target._eager = torch.compile(eager, mode="max-autotune-no-cudagraphs", dynamic=False, disable=not compiles)
    try:
        return {"seconds": timed(target, passes, context, [nodes], 2.0)[nodes]}
    finally:
        target._eager = eager
        passes._graphs.forget()


@torch.no_grad()
def _eager_step(target: Target, context: int, nodes: int) -> Row:
    """Return the seconds of an uncaptured forward pass, up to the argmax of each node on the host: best of several."""
    draft = Draft(torch.zeros(nodes, dtype=torch.long), star(nodes))
    kept, best = filled(target, context), math.inf
    for done in range(_ROUNDS + 1):
        synchronize(target.device)
        start = time.perf_counter()
        target.forward(target.inputs.of([draft], [context], context), kept).argmax(-1).tolist()
        if done:
            best = min(best, time.perf_counter() - start)
        kept.keep(context, [context], [[]])
    return {"seconds": best}


@torch.no_grad()
def _forward(target: Target, context: int, nodes: int) -> Row:
    """Return the seconds of the model's forward pass alone, run as in a step and with the same shapes: the best of
    several rounds. The rest of a step is overhead.
    """
    passes, draft, best = _passes(target), Draft(torch.zeros(nodes, dtype=torch.long), star(nodes)), math.inf
    passes.begin(target, filled(target, context), [context], context + nodes)
    for done in range(_ROUNDS + 1):
        synchronize(target.device)
        start = time.perf_counter()
        passes.forward(target, [draft], [context])
        synchronize(target.device)
        if done:  # the first round captures and compiles
            best = min(best, time.perf_counter() - start)
    return {"seconds": best}


@torch.no_grad()
def _eager_profile(target: Target, context: int) -> Row:
    """Profile a forward pass over one token as in `generate`, without the work of `generate` between passes."""
    cache = filled(target, context)
    ids = torch.ones(1, 1, dtype=torch.long, device=target.device)

    def token() -> None:
        target.model(input_ids=ids, past_key_values=cache.cache, use_cache=True).logits.argmax(-1).tolist()

    return profiled(token, target.device)


@torch.no_grad()
def _step_profile(target: Target, context: int, nodes: int) -> Row:
    passes = _passes(target)
    passes.begin(target, filled(target, context), [context], context + nodes)
    return profiled(lambda: one_step(target, passes, context, nodes)(), target.device)
