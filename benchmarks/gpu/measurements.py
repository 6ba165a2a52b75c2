"""The measurements of one shape at one context length, each a row of its own."""

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
"""Nodes of the steps whose forward pass is measured alone, and that are profiled."""


@dataclass(frozen=True)
class Wanted:
    """What is measured of each shape."""

    sizes: tuple[int, ...] = ROWS
    """Nodes of captured steps."""
    compared: tuple[int, ...] = (1, 8, 16, 32, 64)
    """Nodes of the steps that are also measured eager, and captured with a compiled forward pass."""
    compiles: bool = True
    """Whether torch compiles; without, the same is run uncompiled."""


EVERYTHING, FEW = Wanted(), Wanted((1, 8, 64), (1,), False)
_ROUNDS = 20
"""Forward passes that are measured alone."""
_GENERATED, _WARM = 24, 6
"""Tokens that `generate` writes, and how many of them are not counted: the prompt's, and those that compile."""

Measurement = Callable[[Target, int], Row]


def measurements(shape: str, context: int, wanted: Wanted = EVERYTHING) -> Iterator[tuple[Row, Measurement]]:
    """What is to be measured, and how."""
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
    """When each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is held back."""


@torch.no_grad()
def _generate(target: Target, context: int, config: CompileConfig | None, static: bool = False) -> Row:
    """Seconds of a token of transformers' own `generate`: the median between two of them. `static`: with a static
    cache, for which it compiles the forward pass as `config` says; the prompt is read by `generate` then.
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
    """Seconds of a captured step whose forward pass torch compiles first: once for each shape, up to a minute."""
    passes, eager = _passes(target), target.eager
    passes.forget()
    target.eager = torch.compile(eager, mode="max-autotune-no-cudagraphs", dynamic=False, disable=not compiles)
    try:
        return {"seconds": timed(target, passes, context, [nodes], 2.0)[nodes]}
    finally:
        target.eager = eager
        passes.forget()


@torch.no_grad()
def _eager_step(target: Target, context: int, nodes: int) -> Row:
    """Seconds of the forward pass of an uncaptured step, to the choice at each node on the host: the best of some."""
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
    """Seconds of the model's forward pass, run as a step runs it and with the same shapes, but alone: what of a step is
    not this is overhead. The best of some rounds.
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
    """Of a pass over one token as `generate` makes it, without what it does between passes."""
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
