"""How a person sees what `token-recycling tune` found: tables of curves, forecasts and trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from . import console

_BAR = 24


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
