"""A table, made once and written three ways: for a terminal and as Markdown here, as HTML by page.html."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    """Columns of words; the others are figures."""


def as_text(table: Table, width: int) -> str:
    """For a terminal of that width; columns that find no place stand below, after the names again. A star marks the
    best of a column, an exclamation mark an alarm.
    """
    import pandas as pd

    cells = [[cell.text + "*" * cell.best + "!" * cell.alarm for cell in row] for row in table.rows]
    frame = pd.DataFrame(cells, columns=table.columns).set_index(
        [table.columns[place] for place in sorted(table.words)]
    )
    lines = frame.to_string(line_width=width, sparsify=False, index_names=True).splitlines()
    return "\n".join(line.rstrip(" \\") for line in lines)


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
