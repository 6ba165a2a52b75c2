"""How a person sees what `token-recycling tune` found: pictures and a table of curves, forecasts and trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.bar import Bar
from rich.console import Console
from rich.table import Column, Table

from ..trees.templates import parse_paths
from .console import percent, say
from .cost_picture import picture

_BAR = 24


def print_curves(
    out: Console, setting: dict[str, str], curves: Sequence[dict[str, Any]], forecast: Sequence[dict[str, Any]]
) -> None:
    """The curves: a picture of each with the sizes that pay, and their figures in one table."""
    threads = f", threads: {setting['threads']}" if setting["threads"] else ""
    say(out, f"{setting['model']}, {setting['dtype']}, {setting['device']}{threads}")
    say(
        out,
        "t(n): a forward pass over n nodes, the root included. t(1): the time of one token, decoded plainly.",
        "dim",
    )
    for curve in curves:
        say(out, f"\nt(n) / t(1) after {curve['length']:,} tokens, where t(1) is {curve['milliseconds_of_one']:.2f} ms")
        best = {row["chance"]: row["tree"]["nodes"] + 1 for row in forecast if row["length"] == curve["length"]}
        say(out, picture({size["nodes"]: size["relative"] for size in curve["sizes"]}, best.values()))
        found = ", ".join(f"{nodes} at {chance}" for chance, nodes in best.items())
        say(out, f"▲ the tree that pays most, root included, by the chance of each candidate: {found}")
    names = ("t(n) / t(1)", "one more")
    headings = (f"{name}\nafter {curve['length']:,}" for curve in curves for name in names)
    table = Table(*(Column(name, justify="right") for name in ("n", *headings)))
    sizes = [{size["nodes"]: size for size in curve["sizes"]} for curve in curves]
    for nodes in sorted(set().union(*sizes)):
        table.add_row(str(nodes), *(cell for measured in sizes for cell in _cells(measured.get(nodes))))
    out.print(table)
    say(
        out,
        "One more: what each further node costs since the size before, in tokens. It pays if it brings more tokens per "
        "time than the tree has without it.",
        "dim",
    )


def _cells(size: dict[str, Any] | None) -> tuple[str, str]:
    """The time of a size, and what one more node costs; empty where it was not measured."""
    if size is None:
        return "", ""
    return f"{size['relative']:.2f}", "" if size["one_more"] is None else f"{size['one_more']:.3f}"


def print_forecast(out: Console, rows: Sequence[dict[str, Any]]) -> None:
    """How large a chain and a tree pay at a few levels of acceptance."""
    names = ("after tokens", "chance", "chain, nodes", "MAT", "x plain", "tree, nodes", "MAT", "x plain")
    columns = (Column(name, justify="right") for name in names)
    title = "the size that pays, if each candidate is right with one chance"
    table = Table(*columns, title=title, title_justify="left")
    for place, row in enumerate(rows):
        if place and row["length"] != rows[place - 1]["length"]:
            table.add_section()
        cells = [f"{row['length']:,}", f"{row['chance']:.1f}"]
        for shape in (row["chain"], row["tree"]):
            cells += [str(shape["nodes"]), f"{shape['tokens']:.2f}", f"{shape['times_plain']:.2f}"]
        table.add_row(*cells)
    out.print(table)
    say(
        out,
        "In a chain the best candidate is right with this chance; in a tree the next one has the same chance of what "
        "is left, and so on.\nForward passes alone; --prompts shows what your own texts make of it.",
        "dim",
    )


def print_grown(out: Console, found: dict[str, Any]) -> None:
    """The sizes that trees grown at each step had."""
    columns = (*(Column(name, justify="right") for name in ("drafted nodes", "steps")), Column("", width=_BAR))
    table = Table(*columns, title="trees grown at each step, with the curves above", title_justify="left")
    groups: Counter[int] = Counter()
    for nodes, steps in found["steps_by_drafted"].items():
        groups[int(nodes).bit_length()] += steps
    for group in range(min(groups), max(groups) + 1):
        first, last = 2**group // 2, 2**group - 1
        shown = str(first) if first >= last else f"{first} to {last}"
        share = groups[group] / found["steps"]
        table.add_row(shown, percent(share), Bar(max(groups.values()), 0, groups[group], width=_BAR))
    out.print(table)
    say(
        out,
        f"MAT {found['mat']:.2f} at a mean cost of {found['mean_cost']:.2f} t(1): "
        f"{found['times_plain']:.2f} times plain decoding, forward passes alone",
    )


def print_fixed(out: Console, found: dict[str, Any]) -> None:
    """The best template of a fixed shape, and why."""
    shares = " ".join(f"{share:.3f}" for share in found["acceptance_by_rank"])
    best = found["best"]
    say(
        out,
        f"\nacceptance by rank, recorded: {shares}\n"
        f"fixed tree that pays most after {found['length']:,} tokens: {best['nodes']} nodes, expected MAT "
        f"{best['tokens']:.2f} at a cost of {best['cost']:.2f} t(1), {best['times_plain']:.2f} times plain decoding",
    )
    if found["nodes"] != best["nodes"]:
        worth = (
            f"at a cost of {found['cost']:.2f} t(1), {found['times_plain']:.2f} times plain decoding"
            if found["cost"]
            else "at a cost beyond what was measured"
        )
        say(out, f"as asked for: {found['nodes']} nodes, expected MAT {found['tokens']:.2f} {worth}")
    out.print("A forecast, as if each rank were right as often at every depth.", style="dim")
    if found["nodes"]:
        out.print(parse_paths(" ".join(found["paths"])).drawn(), highlight=False, markup=False)


def print_files(out: Console, result: dict[str, Any]) -> None:
    """Which files were written, and who reads them."""
    uses = (
        ("curves", "file", "accelerate() finds them by itself"),
        ("template", "template", "--drafter recycling:tree={0} or published:tree={0}"),
        ("primed", "primed", "--drafter recycling:primed=true finds them by itself"),
    )
    out.print()
    for name, key, use in uses:
        if key in result:
            say(out, f"{name + ':':10}{result[key]}  ({use.format(result[key])})")
