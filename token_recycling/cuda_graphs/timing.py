"""What a fast step of n nodes costs: t(n) as `costs` wants it, measured on the step that will run.

A tree is filled up to a bucket, so that the curve is a staircase: one node more costs nothing until the next bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from .._util.device import synchronize
from ..costs.curve import CostCurve
from ..model.pass_costs import filled, with_room
from ..trees.draft import Draft
from ..trees.templates import star
from .slots import band_of
from .sources import BUCKETS, bucket_of
from .step import Choice, StepPlan

if TYPE_CHECKING:
    from ..model.tree_model import TreeModel
    from .runner import StepRunner

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20


def staircase(target: TreeModel, runner: StepRunner, length: int, seconds: float = 1.0) -> CostCurve:
    """The curve for texts of `length` tokens, the best of some rounds within some `seconds`, three at least."""
    length = with_room(target, length, BUCKETS[-1])
    limit = length + BUCKETS[-1] if target.max_length is None else target.max_length
    sizes = [nodes for nodes in BUCKETS if nodes == 1 or length + nodes <= limit]
    best = timed(target, runner, length, sizes, seconds)
    firsts = [1, *(before + 1 for before in sizes[:-1])]
    ends = sorted({*firsts, *sizes})
    return CostCurve(length, tuple(ends), tuple(best[bucket_of(end)] for end in ends))


@torch.no_grad()
def timed(
    target: TreeModel, runner: StepRunner, length: int, sizes: Sequence[int], seconds: float, k: int = 8
) -> dict[int, float]:
    """Seconds of a step by number of nodes, each a size of its own, after `length` tokens: from the draft on the host
    to what the host reads, `k` candidates for every node among it.
    """
    runner.begin(filled(target, length), length + max(sizes))
    best: dict[int, float] = {}
    began = time.perf_counter()
    for done in range(_MOST_ROUNDS + 1):
        if done > _LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for nodes in sizes:
            step = one_step(target, runner, length, nodes, k)
            synchronize(target.device)
            start = time.perf_counter()
            step()
            taken = time.perf_counter() - start
            if done:  # the first round captures and compiles
                best[nodes] = min(taken, best.get(nodes, taken))
            else:
                began = time.perf_counter()
    return best


def one_step(target: TreeModel, runner: StepRunner, length: int, nodes: int, k: int = 8) -> Callable[[], None]:
    """A step of `nodes` nodes after `length` tokens of a text that the runner has begun: from the draft on the host to
    what the host reads. To be called without gradients.
    """
    source = runner.host_source(nodes)
    plan = StepPlan(nodes, source.depths, band_of(length + nodes), k, bool(k), False)
    draft = Draft(star(nodes), torch.zeros(nodes, dtype=torch.long))
    runner.cache.shared.length.fill_(length)

    def step() -> None:
        source.send(draft)
        runner.run(target, plan, source, Choice())

    return step
