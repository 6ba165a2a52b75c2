"""A table, made once and written three ways: for a terminal and as Markdown here, as HTML by page.html."""

from __future__ import annotations

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
    return [_as_rich(table, places, width, number == 0) for number, places in enumerate(shown or [names])]


def _as_rich(table: Table, places: list[int], width: int, first: bool) -> rich.table.Table:
    whole = sum(_width(table, place) + 2 for place in places) - 2 <= width
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
            shown.add_column(head, justify="right", width=(_width if whole else _least_width)(table, place))
    for row in table.rows:
        cells = [row[place] for place in places]
        shown.add_row(*(Text(cell.text, "bold red" if cell.alarm else "bold" if cell.best else "") for cell in cells))
    return shown


def _width(table: Table, place: int) -> int:
    """Of a column, its head in one line; of names the least."""
    if place in table.words:
        return _LEAST
    return max(map(len, [table.columns[place], *(row[place].text for row in table.rows)]))


def _least_width(table: Table, place: int) -> int:
    """Of a column, a word of its head in a line; of names the least."""
    if place in table.words:
        return _LEAST
    return max(map(len, [*table.columns[place].split(), *(row[place].text for row in table.rows)]))


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
