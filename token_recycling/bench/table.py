"""A table, made once and written three ways: for a terminal and as Markdown here, as HTML by page.html."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import rich.box
import rich.table
from rich.text import Text

NONE = "-"
"""Where there is no figure."""


class Cell(NamedTuple):
    """One figure or word."""

    text: str
    best: bool = False
    alarm: bool = False


@dataclass(frozen=True)
class Table:
    """Columns, the first of them names, the others figures."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    words: frozenset[int] = frozenset({0})
    """Columns of words, which may be broken over lines; the others are figures."""


def as_rich(table: Table, width: int) -> list[rich.table.Table]:
    """For a terminal of that width; columns that find no place stand in a table below, after the names again."""
    names = [place for place in range(len(table.columns)) if place in table.words or place == 0]
    figures = [place for place in range(len(table.columns)) if place not in names]
    shown: list[list[int]] = []
    for place in figures:
        if shown and sum(_least_width(table, each) + 2 for each in [*shown[-1], place]) - 2 <= width:
            shown[-1].append(place)
        else:
            shown.append([*names, place])
    return [_as_rich(table, places, number == 0) for number, places in enumerate(shown or [names])]


def _as_rich(table: Table, places: list[int], first: bool) -> rich.table.Table:
    shown = rich.table.Table(
        title=table.title if first else None,
        title_justify="left",
        title_style="bold",
        box=rich.box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for place in places:
        # Figures are never broken; names are, where a terminal is narrow.
        words = place in table.words
        shown.add_column(
            Text(table.columns[place]),
            justify="left" if words else "right",
            min_width=_least_width(table, place),
            overflow="fold",
        )
    for row in table.rows:
        cells = [row[place] for place in places]
        shown.add_row(*(Text(cell.text, "bold red" if cell.alarm else "bold" if cell.best else "") for cell in cells))
    return shown


def _least_width(table: Table, place: int) -> int:
    if place in table.words:
        return 12
    return max(map(len, [*table.columns[place].split(), *(row[place].text for row in table.rows)]))


def as_markdown(table: Table) -> str:
    """A heading is left to the caller."""
    lines = [
        [_escaped(column) for column in table.columns],
        ["---" if place in table.words else "---:" for place in range(len(table.columns))],
        *([f"**{_escaped(c.text)}**" if c.best or c.alarm else _escaped(c.text) for c in row] for row in table.rows),
    ]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{table.note}" if table.note else text


def _escaped(text: str) -> str:
    """Text of a Markdown cell: a bar would start the next one, and some signs would be read as markup."""
    for sign in "\\`*_<|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
