"""How every plot looks: one colour and one marker for a method everywhere, and ink that follows the page's light or
dark.

The palette was chosen for the largest least distance between any two colours under normal vision and simulated
protanopia, deuteranopia and tritanopia. Drawings are made with matplotlib's object interface: nothing global is
touched. Files in `plots/` stand on white; on a page colours become CSS variables.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from ..summary import BASELINES

INK, MUTED, GRID, PAPER = "#1f2329", "#5e6771", "#dfe3e8", "#fffffe"
_DARK_INK = {INK: "#e8ebef", MUTED: "#9aa4af", GRID: "#2f363e", PAPER: "#14181d"}
GREY = "#7d8691"
PALETTE = {
    "#2f5fc4": "#7ea6fa",
    "#f08a10": "#f2b04a",
    "#3fa79f": "#5fe0cb",
    "#a82418": "#d85a4c",
    "#d07be6": "#e7b0f5",
    "#8f9f5a": "#cfe08a",
    "#56386c": "#8a63d8",
    "#894748": "#a8797a",
}
"""Colours on white, each with its counterpart on black."""
HEAT = {
    "#eef3fb": "#1c2430",
    "#d6e3f6": "#22344e",
    "#b0cbee": "#2b4a77",
    "#7fa9e0": "#3b69a8",
    "#4f82cd": "#5b90d6",
    "#2c5cab": "#8fb8ee",
    "#173a78": "#cfe1fb",
}
"""From little to much, each with its counterpart on black."""
MARKERS = "osD^vph<"
WIDTH = 5.4
"""Inches: 518 pixels, two plots beside each other on a desktop, and readable on a phone."""

_VARIABLES = {
    **{colour: f"--{name}" for name, colour in (("ink", INK), ("muted", MUTED), ("grid", GRID), ("paper", PAPER))},
    **{colour: f"--c{number}" for number, colour in enumerate(PALETTE)},
    **{colour: f"--h{number}" for number, colour in enumerate(HEAT)},
}
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": MUTED,
    "axes.titlecolor": INK,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a label is a dollar
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.2,
    "legend.columnspacing": 1.4,
    "lines.linewidth": 1.6,
    "lines.markeredgecolor": PAPER,
    "lines.markeredgewidth": 0.6,
    "lines.markersize": 6,
}


@dataclass(frozen=True)
class Look:
    """Colour and marker of a method."""

    colour: str
    marker: str


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
        """Writes an SVG file that looks the same everywhere: text as outlines, on white."""
        path = folder / f"{self.name}.svg"
        path.write_text(_svg(self.drawing, self.name, "path", "white"), encoding="utf-8")
        return path

    def inline(self) -> str:
        """The SVG element for a page: text as text, transparent, in the page's colours."""
        text = _svg(self.drawing, self.name, "none", "none")
        text = re.sub(r"(?s)^.*?(?=<svg)", "", text)
        text = re.sub(r"(?s)\s*<metadata>.*?</metadata>", "", text)
        # Ids are made unique, since several drawings stand on one page.
        text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{self.name}-", text)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, f"var({variable})")
        return text.replace("<svg ", f'<svg role="img" aria-label="{escape(self.title)}. {escape(self.caption)}" ', 1)


def css(dark: bool) -> str:
    """The variables that drawings on a page use."""
    shades = {**_DARK_INK, **PALETTE, **HEAT} if dark else {}
    return " ".join(f"{variable}: {shades.get(colour, colour)};" for colour, variable in _VARIABLES.items())


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """A look for every method, in their order: grey for the baselines; beyond the palette colours repeat with other
    markers.
    """
    found, colours = dict.fromkeys(methods, Look(GREY, "o")), list(PALETTE)
    for place, method in enumerate(method for method in found if method not in BASELINES):
        turn = place + place // len(colours)
        found[method] = Look(colours[place % len(colours)], MARKERS[turn % len(MARKERS)])
    return found


def canvas(height: float, rows: int = 1, columns: int = 1, **extra: Any) -> tuple[Figure, list[Axes]]:
    """A drawing of the common width, and its axes row by row."""
    figure = Figure(figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.05))
    axes = figure.subplots(rows, columns, squeeze=False, **extra)
    for each in axes.flat:
        each.tick_params(length=0)
    return figure, list(axes.flat)


def panels(labels: Sequence[str], above: float, height: float) -> tuple[Figure, list[Axes]]:
    """A drawing with axes for each label, two beside each other; `height` are the inches of each without its label."""
    columns = 2 if len(labels) > 1 else 1
    rows = -(-len(labels) // columns)
    figure, every = canvas(above + rows * (height + room(labels)), rows, columns, sharex=True, sharey=True)
    for axes in every[len(labels) :]:
        axes.set_visible(False)
    return figure, every


def ruled(axes: Axes, along: Literal["x", "y"]) -> None:
    """Lines at the ticks of one axis, instead of the border on the left."""
    axes.grid(True, axis=along)
    axes.spines["left"].set_visible(False)


def styled() -> Any:
    """A context in which drawings get their look."""
    return matplotlib.rc_context(_STYLE)


def wrapped(label: str, width: int = 32) -> str:
    """A label in lines of at most `width` letters; by default those of half a drawing."""
    return textwrap.fill(label, width, break_on_hyphens=False)


def room(labels: Iterable[str]) -> float:
    """Inches that the longest of these wrapped labels takes beyond its first line."""
    return 0.145 * max((wrapped(label).count("\n") for label in labels), default=0)


def height(lines: Iterable[str]) -> float:
    """Inches of a row in which the longest of these wrapped labels has room."""
    return 0.22 + 0.14 * max((label.count("\n") for label in lines), default=0)


def key(label: str, look: Look, line: bool = False) -> Line2D:
    """A legend entry."""
    how: Any = {"markeredgecolor": look.colour, "markeredgewidth": 1.0, "linestyle": "-" if line else "none"}
    return Line2D([], [], color=look.colour, marker=look.marker, label=label, **how)


def legend(figure: Figure, entries: list[Any]) -> None:
    """The legend above a drawing: two columns where labels are short."""
    columns = 2 if max((len(entry.get_label()) for entry in entries), default=0) <= 34 and len(entries) > 1 else 1
    figure.legend(handles=entries, loc="outside upper left", ncols=columns, borderaxespad=0.1)


def _svg(drawing: Figure, salt: str, text_as: str, background: str) -> str:
    file = io.StringIO()
    FigureCanvasSVG(drawing)
    with matplotlib.rc_context({**_STYLE, "svg.fonttype": text_as, "svg.hashsalt": salt}):
        # Without a date, the same rows give the same bytes.
        drawing.savefig(file, format="svg", metadata={"Date": None}, facecolor=background)
    drawing.set_layout_engine("none")  # what is laid out stays so: half of the time of saving again
    return file.getvalue()
