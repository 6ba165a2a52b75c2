"""A table, made once and written three ways: for a terminal and as Markdown here, as HTML by page.html."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import rich.box
import rich.table
from rich.text import Text

NONE = "-"
"""Where there is no figure."""
_LEAST = 12
"""Letters of names in a line."""


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
    spare: frozenset[int] = frozenset()
    """Columns that a page leaves out where there is little room."""


def as_rich(table: Table, width: int) -> list[rich.table.Table]:
    """For a terminal of that width; columns that find no place stand in a table below, after the names again."""
    names = [place for place in range(len(table.columns)) if place in table.words or place == 0]
    figures = [place for place in range(len(table.columns)) if place not in names]
    shown: list[list[int]] = []
    for place in figures:
        if shown and _width(table, [*shown[-1], place], broken=True) <= width:
            shown[-1].append(place)
        else:
            shown.append([*names, place])
    return [_as_rich(table, places, width, number == 0) for number, places in enumerate(shown or [names])]


def _as_rich(table: Table, places: list[int], width: int, first: bool) -> rich.table.Table:
    broken = _width(table, places, broken=False) > width
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
        # Figures are never broken; their heads are, and names, where a terminal is narrow.
        head = Text(table.columns[place])
        if place in table.words:
            shown.add_column(head, min_width=_LEAST, overflow="fold")
        else:
            shown.add_column(head, justify="right", width=_width(table, [place], broken))
    for row in table.rows:
        cells = [row[place] for place in places]
        shown.add_row(*(Text(cell.text, "bold red" if cell.alarm else "bold" if cell.best else "") for cell in cells))
    return shown


def _width(table: Table, places: Sequence[int], broken: bool) -> int:
    """Letters of columns beside each other, the heads in one line or `broken` at spaces; of names the least."""
    found = 2 * len(places) - 2
    for place in places:
        head = table.columns[place].split() if broken else [table.columns[place]]
        figures = [row[place].text for row in table.rows]
        found += _LEAST if place in table.words else max(map(len, [*head, *figures]))
    return found


def as_markdown(table: Table) -> str:
    """A heading is left to the caller."""
    lines = [
        [escaped(column) for column in table.columns],
        ["---" if place in table.words else "---:" for place in range(len(table.columns))],
        *([f"**{escaped(c.text)}**" if c.best or c.alarm else escaped(c.text) for c in row] for row in table.rows),
    ]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{text}\n\n{escaped(table.note)}" if table.note else text


def escaped(text: str) -> str:
    """A text as Markdown in one line, none of its signs read as markup, or as the border of a cell."""
    for sign in "\\`*_<[|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
