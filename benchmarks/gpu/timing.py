"""Timing of steps with captured forward passes over n nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from token_recycling._util.device import synchronize
from token_recycling.loop.accept import TreeSteps
from token_recycling.model.graphs.passes import CapturedPasses
from token_recycling.model.kv_cache import TreeCache
from token_recycling.model.prefill import prefill
from token_recycling.model.target import Target
from token_recycling.model.tree_layer import TreeLayer
from token_recycling.trees.draft import Draft, star

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20
_PROMPT = 16


@torch.no_grad()
def timed(
    target: Target, passes: CapturedPasses, length: int, sizes: Sequence[int], seconds: float, k: int = 8
) -> dict[int, float]:
    """Return the seconds of a step by number of nodes, padded to a bucket, after `length` tokens: from the draft on the
    host to the results on the host, which include `k` candidates per node.
    """
    passes.begin(target, filled(target, length), [length], length + max(sizes))
    best: dict[int, float] = {}
    began = time.perf_counter()
    for done in range(_MOST_ROUNDS + 1):
        if done > _LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for nodes in sizes:
            step = one_step(target, passes, length, nodes, k)
            synchronize(target.device)
            start = time.perf_counter()
            step()
            taken = time.perf_counter() - start
            if done:  # the first round captures and compiles
                best[nodes] = min(taken, best.get(nodes, taken))
            else:
                began = time.perf_counter()
    return best


def one_step(target: Target, passes: CapturedPasses, length: int, nodes: int, k: int = 8) -> Callable[[], None]:
    """Return a function that runs a step of `nodes` nodes after `length` tokens of a sequence that `passes` has begun,
    from the draft on the host to the results on the host. Call the function without gradients.
    """
    draft = Draft(torch.zeros(nodes, dtype=torch.long), star(nodes))

    def step() -> None:
        seen = passes.forward(target, [draft], [length])
        assert seen.trees is not None
        TreeSteps([draft], seen.logits, seen.trees, seen.logits.argmax(dim=-1), k)

    return step


def filled(model: Target, length: int) -> TreeCache:
    """Return a cache as after `length` tokens. Where the layers allow it, the states of a few tokens are repeated."""
    cache = model.new_cache()
    tokens = torch.arange(1, min(_PROMPT, length) + 2, device=model.device) % model.embedded
    prefill(model, [tokens], cache)
    if all(type(layer) is TreeLayer for layer in cache.cache.layers):
        times = -(-length // cache.length)
        for layer in cache.layers:
            states = [part.repeat(1, 1, times, 1)[:, :, :length] for part in layer.states()]
            layer.reset()
            layer.load(states[0], states[1], dropped=0)
        return cache
    cache = model.new_cache()
    prefill(model, [torch.arange(length + 1, device=model.device) % model.embedded], cache)
    return cache
