"""What `token-recycling tune` measures and decodes, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .._util.files import replacing
from ..costs import tune
from ..costs.curve import CostCurve
from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..drafters.recycling import Recycling
from ..drafters.recycling.priming import primed_file
from ..hf.accelerate import accelerated
from ..loop.stats import Stats
from ..model import loading
from ..model.cost_store import file_of, setting
from ..model.pass_costs import PassCosts
from ..model.tree_model import TreeModel
from ..trees.templates import parse_paths, written
from . import console

CHANCES = (0.5, 0.7, 0.9)
"""Levels of acceptance for which a forecast is shown."""


def measured(costs: PassCosts, longest: int, seconds: float) -> dict[str, Any]:
    """Measures the curves for texts of up to `longest` tokens and saves them: what they are, and the file."""
    curves = []
    for length in costs.lengths(longest):
        with console.working(f"measuring after {length:,} tokens"):
            curves.append(costs.measure(length, seconds))
    costs.keep(curves)
    return {
        "setting": setting(costs.model, costs.kind),
        "curves": [_curve(curve) for curve in curves],
        "file": str(file_of(costs.model, costs.kind)),
    }


def _curve(curve: CostCurve) -> dict[str, Any]:
    """One curve: the time of a token, and of every size the time in units of it."""
    times = curve.relative()
    return {
        "length": curve.length,
        "milliseconds_of_one": 1000 * curve.seconds[0],
        "sizes": [
            {"nodes": n, "relative": float(times[n - 1]), "one_more": more}
            for n, more in zip(curve.sizes, tune.one_more(curve), strict=True)
        ],
    }


def forecasts(costs: PassCosts, longest: int) -> list[dict[str, Any]]:
    """For each saved curve and a few levels of acceptance how large a chain and a tree pay."""
    return [
        {
            "length": curve.length,
            "chance": chance,
            "chain": _size(tune.best_size(curve, [chance])),
            "tree": _size(tune.best_size(curve, tune.shared_chances(chance))),
        }
        for curve in (costs.curve(length) for length in costs.lengths(longest))
        for chance in CHANCES
    ]


def _size(size: tune.Size) -> dict[str, Any]:
    return {**size._asdict(), "times_plain": size.times_plain}


def decoded(
    loaded: loading.Loaded,
    costs: PassCosts,
    prompts: Sequence[torch.Tensor],
    recorder: Drafter,
    max_new_tokens: int,
    nodes: int | None,
) -> dict[str, Any]:
    """Decodes the prompts twice: with trees that grow by the curves, and with `recorder` to see which ranks are right
    and which fixed tree (of `nodes` nodes, else the best) follows from that.
    """
    runs = _decode(loaded, prompts, make_drafter("recycling"), max_new_tokens, "with trees that grow")
    recorded = sum(_decode(loaded, prompts, recorder, max_new_tokens, "to record the acceptance"), Stats())
    curve = costs.curve(max(ids.shape[1] for ids in prompts))
    return {
        "grown": _grown(costs, runs, prompts),
        "fixed": {"drafter": recorder.describe(), **_fixed(curve, recorded, nodes)},
    }


def _decode(
    loaded: loading.Loaded, prompts: Sequence[torch.Tensor], drafter: Drafter, max_new_tokens: int, what: str
) -> list[Stats]:
    """Decodes all prompts greedily, in order; the statistics of each."""
    found = []
    bar = console.working(f"decoding {what}", len(prompts))
    with accelerated(loaded.model, drafter) as acceleration, bar as advance:
        for ids in prompts:
            loaded.model.generate(**loading.arguments(loaded, ids, max_new_tokens))
            found.append(acceleration.stats)
            advance(1)
    return found


def _grown(costs: PassCosts, runs: Sequence[Stats], prompts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """What trees grown at each step were like, and what they were worth by the measured curves."""
    total = sum(runs, Stats())
    cost = sum(
        tune.passes_cost(costs.curve(ids.shape[1]), stats.nodes) for stats, ids in zip(runs, prompts, strict=True)
    )
    return {
        "steps": total.steps,
        "tokens": total.tokens,
        "mat": total.mat,
        "mean_cost": cost / total.steps,
        "times_plain": total.tokens / cost,
        "steps_by_drafted": {nodes - 1: steps for nodes, steps in sorted(total.nodes.items())},
    }


def _fixed(curve: CostCurve, recorded: Stats, nodes: int | None) -> dict[str, Any]:
    """The acceptance by rank that was recorded, and the template grown from it: of `nodes` nodes, else the best."""
    acceptance = tune.rank_acceptance(recorded.acceptance_by_rank)
    best, times = tune.best_size(curve, acceptance), curve.relative()
    wanted = best.nodes if nodes is None else nodes
    cost = float(times[wanted]) if wanted < len(times) else None
    tokens = float(tune.expected_tokens(acceptance, wanted)[wanted])
    return {
        "acceptance_by_rank": acceptance,
        "best": _size(best),
        "length": curve.length,
        "nodes": wanted,
        "tokens": tokens,
        "cost": cost,
        "times_plain": tokens / cost if cost else None,
        "paths": written(tune.template(acceptance, wanted)).split() if wanted else [],
    }


def write_template(path: Path, paths: Sequence[str]) -> Path:
    """Writes rank paths, a line for each depth; raises ValueError if there are none."""
    if not paths:
        raise ValueError(
            "expected a fixed tree that pays for --template, got none: plain decoding is faster here; "
            "--nodes N makes one of N nodes all the same"
        )
    with replacing(path) as temporary:
        Path(temporary).write_text(written(parse_paths(" ".join(paths))), encoding="utf-8")
    return path


def primed(target: TreeModel) -> Path:
    """Makes the rows that `recycling:primed=true` begins with, unless they are there; returns their file."""
    drafter = Recycling(primed=True)
    with console.working(f"asking for the candidates after each of {target.vocab_size:,} tokens"):
        drafter.prepare(target)
    return primed_file(target.model, drafter.k)
