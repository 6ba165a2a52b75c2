"""How every plot looks: one colour and one marker for a method everywhere, on white.

The palette was chosen for the largest least distance between any two colours under normal vision and simulated
protanopia, deuteranopia and tritanopia.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from ..row_format import BASELINES

GREY, GRID = "#7d8691", "#dfe3e8"
PALETTE = ["#2f5fc4", "#f08a10", "#3fa79f", "#a82418", "#d07be6", "#8f9f5a", "#56386c", "#894748"]
MARKERS = "osD^vph<"
WIDTH = 5.4
"""Inches."""
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.parse_math": False,  # a dollar in a label is a dollar
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": GRID,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "path",
}


class Look(NamedTuple):
    """Colour and marker of a method."""

    colour: str
    marker: str


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A look for every method, in their order: grey for the baselines; beyond the palette colours repeat with other
    markers.
    """
    found = dict.fromkeys(methods, Look(GREY, "o"))
    for place, method in enumerate(method for method in found if method not in BASELINES):
        turn = place + place // len(PALETTE)
        found[method] = Look(PALETTE[place % len(PALETTE)], MARKERS[turn % len(MARKERS)])
    return found


@dataclass(frozen=True)
class Plot:
    """A drawing with the words that go with it."""

    name: str
    """Of the file, without ending."""
    title: str
    caption: str
    """What is shown and how to read it, in plain sentences."""
    drawing: Figure

    def save(self, folder: Path) -> Path:
        """Write the SVG file: text as outlines, without a date, so that the same rows give the same bytes."""
        path = folder / f"{self.name}.svg"
        FigureCanvasSVG(self.drawing)
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            self.drawing.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
        return path


def canvas(height: float, rows: int = 1, columns: int = 1, **extra: Any) -> tuple[Figure, list[Axes]]:
    """A drawing of the common width, and its axes row by row."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **extra).flat)


def styled() -> Any:
    """A context in which drawings get their look."""
    return matplotlib.rc_context(_STYLE)


def wrapped(label: str, width: int = 32) -> str:
    """A label in lines of at most `width` letters; by default those of half a drawing."""
    return textwrap.fill(label, width, break_on_hyphens=False)


def legend(figure: Figure, axes: Axes) -> None:
    """The legend of what has a label, above a drawing: two columns where labels are short."""
    handles, labels = axes.get_legend_handles_labels()
    columns = 2 if max(map(len, labels), default=0) <= 34 else 1
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(labels) // columns))
