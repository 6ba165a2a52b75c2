"""What `compare` shows a person: each prompt with its answer by steps, and a table of all at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from .console import SEPARATOR, by_step, has_colours, say
from .side_by_side import WAYS, SideBySide

ROWS = 12
"""Prompts that have a line each in the table at the end, at most."""
_NO_ANSWER = "no answer: the model ends the text at once"


def tail(text: str, lines: int = 8) -> str:
    """The last lines of a text."""
    kept = text.split("\n")
    return text if len(kept) <= lines else "\n".join(["…", *kept[-lines:]])


def legend(console: Console, drafter: str) -> None:
    """How to read the texts that follow."""
    how = "the two tints take turns" if has_colours(console) else f"a {SEPARATOR} stands before each"
    say(console, f"> a prompt; below it the answer. Tokens of one step came together; {how} ({drafter})\n", "dim")


def print_comparison(console: Console, place: str, found: SideBySide, pieces: Sequence[str]) -> None:
    """One prompt: its end, the answer by steps, and what it took in each way."""
    console.rule(Text(f"{place}: {found.name}"), align="left", characters="─", style="dim")
    for line in tail(found.prompt).split("\n"):
        say(console, f"> {line}", "dim")
    colours = has_colours(console)
    console.print(Text.assemble("" if colours else SEPARATOR, by_step(pieces, colours)), soft_wrap=True)
    console.print()
    if found.divergence is not None:
        say(console, f"differs: {found.divergence}")
    measured = found.as_dict()
    rates = [f"{way} {_rate(measured[way])} tokens/s" for way in _ways(measured)] or [_NO_ANSWER]
    speedup = [f"speedup {measured['speedup']:.2f}"] if found.answered else []
    parts = [f"identical: {_yes(found.identical)}", *rates, *speedup, f"MAT {found.stats.mat:.2f}"]
    say(console, f"{', '.join(parts)} ({found.stats.tokens} tokens in {found.stats.steps} steps)\n")


def print_summary(console: Console, rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> None:
    """The end of a comparison: a line for each prompt, if they are few, and one for all."""
    columns = ("tokens", *WAYS, "speedup", "MAT", "identical")
    right = (Column(name, justify="right", no_wrap=True) for name in columns)
    table = Table(Column("prompt", no_wrap=True, max_width=17), *right, box=SIMPLE, padding=(0, 1, 0, 0))
    for row in rows if 1 < len(rows) <= ROWS else ():
        table.add_row(*_cells(row["name"].removesuffix(".txt"), row, row["stats"]["mat"], row["stats"]["tokens"]))
    table.add_section()
    tokens = sum(row["stats"]["tokens"] for row in rows)
    table.add_row(*_cells(f"all {summary['prompts']}", summary, summary["mat"], tokens))
    console.print(table)
    say(console, "in tokens/s of whole calls; plain: transformers' generate, lookup: its prompt lookup of 10 tokens")
    lines = [("model", summary["model"]), ("drafter", summary["drafter"])]
    if summary["unanswered"]:
        lines.append(("left out", f"speeds of {summary['unanswered']} prompts with {_NO_ANSWER}"))
    if summary["fastest"]:
        lines.append(("fastest", _fastest(summary)))
    for name, value in lines:
        say(console, f"{name + ':':<9} {value}")
    say(console, f"identical: {_yes(summary['identical'])}", "bold")


def _ways(measured: dict[str, Any]) -> list[str]:
    """The ways that were measured."""
    return [way for way in WAYS if measured[way] is not None]


def _fastest(summary: dict[str, Any]) -> str:
    first = summary["fastest"]
    rate = summary[first]["tokens_per_second"]
    others = [f"{rate / summary[way]['tokens_per_second']:.2f} times {way}" for way in _ways(summary) if way != first]
    return f"{first}, {', '.join(others)}"


def _cells(name: str, measured: dict[str, Any], mat: float, tokens: int) -> list[Text]:
    speedup = "-" if measured["speedup"] is None else f"{measured['speedup']:.2f}"
    rates = [_rate(measured[way]) for way in WAYS]
    return [Text(cell) for cell in (name, f"{tokens:,}", *rates, speedup, f"{mat:.2f}", _yes(measured["identical"]))]


def _rate(speed: dict[str, Any] | None) -> str:
    return "-" if speed is None else f"{speed['tokens_per_second']:.1f}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
