"""What `token-recycling tune` measures and decodes, as plain values, and how a person sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from ..model import loading
from . import console

if TYPE_CHECKING:
    import torch

    from ..costs.curve import CostCurve
    from ..costs.measure import PassCosts
    from ..costs.tune import Size
    from ..drafter import Drafter
    from ..model.tree_model import TreeModel
    from ..stats import Stats

CHANCES = (0.5, 0.7, 0.9)
"""Levels of acceptance for which a forecast is shown."""
_BAR = 24


def measured(costs: PassCosts, longest: int, seconds: float) -> dict[str, Any]:
    """Measures the curves for texts of up to `longest` tokens and saves them: what they are, and the file."""
    from ..costs.store import file_of, setting

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
    from ..costs.tune import one_more

    times = curve.relative()
    return {
        "length": curve.length,
        "milliseconds_of_one": 1000 * curve.seconds[0],
        "sizes": [
            {"nodes": n, "relative": float(times[n - 1]), "one_more": more}
            for n, more in zip(curve.sizes, one_more(curve), strict=True)
        ],
    }


def forecasts(costs: PassCosts, longest: int) -> list[dict[str, Any]]:
    """For each saved curve and a few levels of acceptance how large a chain and a tree pay."""
    from ..costs.tune import best_size, shared_chances

    return [
        {
            "length": curve.length,
            "chance": chance,
            "chain": _size(best_size(curve, [chance])),
            "tree": _size(best_size(curve, shared_chances(chance))),
        }
        for curve in (costs.curve(length) for length in costs.lengths(longest))
        for chance in CHANCES
    ]


def _size(size: Size) -> dict[str, Any]:
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
    and which fixed tree (of so many nodes, else the best) follows from that.
    """
    from ..registry import make_drafter
    from ..stats import Stats

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
    from ..hf.accelerate import accelerated

    found = []
    with (
        accelerated(loaded.model, drafter) as acceleration,
        console.advancing(f"decoding {what}", len(prompts)) as advance,
    ):
        for ids in prompts:
            loaded.model.generate(**loading.arguments(loaded, ids, max_new_tokens))
            found.append(acceleration.stats)
            advance(1)
    return found


def _grown(costs: PassCosts, runs: Sequence[Stats], prompts: Sequence[torch.Tensor]) -> dict[str, Any]:
    """What trees grown at each step were like, and what they were worth by the measured curves."""
    from ..costs.tune import passes_cost
    from ..stats import Stats

    total = sum(runs, Stats())
    cost = sum(passes_cost(costs.curve(ids.shape[1]), stats) for stats, ids in zip(runs, prompts, strict=True))
    return {
        "steps": total.steps,
        "tokens": total.tokens,
        "mat": total.mat,
        "mean_cost": cost / total.steps,
        "times_plain": total.tokens / cost,
        "steps_by_drafted": {nodes - 1: steps for nodes, steps in sorted(total.nodes.items())},
    }


def _fixed(curve: CostCurve, recorded: Stats, nodes: int | None) -> dict[str, Any]:
    """The acceptance by rank that was recorded, and the template grown from it: of so many nodes, else the best."""
    from ..costs.tune import best_size, expected_tokens, rank_acceptance, template
    from ..templates import written

    acceptance = rank_acceptance(recorded)
    best = best_size(curve, acceptance)
    wanted = best.nodes if nodes is None else nodes
    times = curve.relative()
    cost = float(times[wanted]) if wanted < len(times) else None
    tokens = float(expected_tokens(acceptance, wanted)[wanted])
    tree = template(acceptance, wanted) if wanted else None
    return {
        "acceptance_by_rank": acceptance,
        "best": _size(best),
        "length": curve.length,
        "nodes": wanted,
        "tokens": tokens,
        "cost": cost,
        "times_plain": tokens / cost if cost else None,
        "paths": written(tree).split() if tree else [],
    }


def write_template(path: Path, paths: Sequence[str]) -> Path:
    """Writes rank paths, a line for each depth; raises ValueError if there are none."""
    from ..files import replacing
    from ..templates import parse_paths, written

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
    from ..drafters.recycling import Recycling
    from ..drafters.recycling.priming import primed_file

    drafter = Recycling(primed=True)
    with console.working(f"asking for the candidates after each of {target.vocab_size:,} tokens"):
        drafter.prepare(target)
    return primed_file(target.model, drafter.k)


def print_curves(out: Console, setting: dict[str, str], curves: Sequence[dict[str, Any]]) -> None:
    """The curves, a table each."""
    threads = f", threads: {setting['threads']}" if setting["threads"] else ""
    out.print(
        f"{setting['model']}, {setting['dtype']}, {setting['device']}{threads}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    out.print(
        "t(n): a forward pass over n nodes, the root included. t(1): the time of one token, decoded plainly.\n"
        "One more node pays if it brings more tokens per time than the tree has without it.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )
    longest = max(size["relative"] for curve in curves for size in curve["sizes"])
    for curve in curves:
        title = f"after {curve['length']:,} tokens, t(1) = {curve['milliseconds_of_one']:.2f} ms"
        table = Table(title=title, title_justify="left")
        for name in ("n", "t(n) / t(1)"):
            table.add_column(name, justify="right")
        table.add_column("", width=_BAR)
        table.add_column("one more node costs, tokens", justify="right")
        for size in curve["sizes"]:
            more = "" if size["one_more"] is None else f"{size['one_more']:.3f}"
            bar = Bar(longest, 0, size["relative"], width=_BAR)
            table.add_row(str(size["nodes"]), f"{size['relative']:.2f}", bar, more)
        out.print(table)


def print_forecast(out: Console, rows: Sequence[dict[str, Any]]) -> None:
    """How large a chain and a tree pay at a few levels of acceptance."""
    table = Table(title="the size that pays, if each candidate is right with one chance", title_justify="left")
    for name in ("after tokens", "chance", "chain, nodes", "MAT", "x plain", "tree, nodes", "MAT", "x plain"):
        table.add_column(name, justify="right")
    for place, row in enumerate(rows):
        if place and row["length"] != rows[place - 1]["length"]:
            table.add_section()
        cells = [f"{row['length']:,}", f"{row['chance']:.1f}"]
        for shape in (row["chain"], row["tree"]):
            cells += [str(shape["nodes"]), f"{shape['tokens']:.2f}", f"{shape['times_plain']:.2f}"]
        table.add_row(*cells)
    out.print(table)
    out.print(
        "In a chain the best candidate is right with this chance; in a tree the next one has the same chance of what "
        "is left, and so on.\nForward passes alone; --prompts shows what your own texts make of it.",
        style="dim",
        highlight=False,
        soft_wrap=True,
    )


def print_grown(out: Console, found: dict[str, Any]) -> None:
    """The sizes that trees grown at each step had."""
    table = Table(title="trees grown at each step, with the curves above", title_justify="left")
    table.add_column("drafted nodes", justify="right")
    table.add_column("steps", justify="right")
    table.add_column("", width=_BAR)
    groups: Counter[int] = Counter()
    for nodes, steps in found["steps_by_drafted"].items():
        groups[int(nodes).bit_length()] += steps
    for group in range(min(groups), max(groups) + 1):
        first, last = 2**group // 2, 2**group - 1
        shown = str(first) if first >= last else f"{first} to {last}"
        share = groups[group] / found["steps"]
        table.add_row(shown, console.percent(share), Bar(max(groups.values()), 0, groups[group], width=_BAR))
    out.print(table)
    out.print(
        f"MAT {found['mat']:.2f} at a mean cost of {found['mean_cost']:.2f} t(1): "
        f"{found['times_plain']:.2f} times plain decoding, forward passes alone",
        highlight=False,
        soft_wrap=True,
    )


def print_fixed(out: Console, found: dict[str, Any]) -> None:
    """The best template of a fixed shape, and why."""
    from ..templates import parse_paths

    shares = " ".join(f"{share:.3f}" for share in found["acceptance_by_rank"])
    out.print(f"\nacceptance by rank, recorded: {shares}", highlight=False, soft_wrap=True)
    best = found["best"]
    out.print(
        f"fixed tree that pays most after {found['length']:,} tokens: {best['nodes']} nodes, expected MAT "
        f"{best['tokens']:.2f} at a cost of {best['cost']:.2f} t(1), {best['times_plain']:.2f} times plain decoding",
        highlight=False,
        soft_wrap=True,
    )
    if found["nodes"] != best["nodes"]:
        worth = (
            f"at a cost of {found['cost']:.2f} t(1), {found['times_plain']:.2f} times plain decoding"
            if found["cost"]
            else "at a cost beyond what was measured"
        )
        wanted = f"as asked for: {found['nodes']} nodes, expected MAT {found['tokens']:.2f} {worth}"
        out.print(wanted, highlight=False, soft_wrap=True)
    out.print("A forecast, as if each rank were right as often at every depth.", style="dim")
    if found["nodes"]:
        out.print(parse_paths(" ".join(found["paths"])).drawn(), highlight=False, markup=False)


def print_files(out: Console, result: dict[str, Any]) -> None:
    """Which files were written, and who reads them."""
    lines = [("curves", "file", "accelerate() finds them by itself")]
    lines.append(("template", "template", "--drafter recycling:tree={0} or published:tree={0}"))
    lines.append(("primed", "primed", "--drafter recycling:primed=true finds them by itself"))
    out.print()
    for name, key, use in lines:
        if key in result:
            line = f"{name + ':':10}{result[key]}  ({use.format(result[key])})"
            out.print(line, markup=False, highlight=False, soft_wrap=True)
