"""Plots of a report, and their style: each method has one color and one marker in all plots.

The palette maximizes the smallest distance between any two colors under normal vision and simulated protanopia,
deuteranopia and tritanopia. The same rows give byte-identical files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from .data import BASELINES
from .summary import Comparison, heading

GREY, GRID = "#7d8691", "#dfe3e8"
PALETTE = ["#2f5fc4", "#f08a10", "#3fa79f", "#a82418", "#d07be6", "#8f9f5a", "#56386c", "#894748"]
MARKERS = "osD^vph<"
WIDTH = 5.4
"""Width of a drawing in inches."""
_RANKS, _DEPTHS = 10, 12
"""Number of ranks and depths in the plot of acceptance."""
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
styled = matplotlib.rc_context(_STYLE)
"""Decorator that applies the style to functions that draw."""


class Look(NamedTuple):
    """Color and marker of a method."""

    color: str
    marker: str


def line_styles(methods: Iterable[str]) -> dict[str, Look]:
    """Return a look for every method, in order: gray for the baselines; beyond the palette, colors repeat with other
    markers.
    """
    chosen = dict.fromkeys(methods, Look(GREY, "o"))
    for index, method in enumerate(method for method in chosen if method not in BASELINES):
        turn = index + index // len(PALETTE)
        chosen[method] = Look(PALETTE[index % len(PALETTE)], MARKERS[turn % len(MARKERS)])
    return chosen


@dataclass(frozen=True)
class Plot:
    """A drawing with its name, title and caption."""

    name: str
    """File name without extension."""
    title: str
    caption: str
    """Description of the plot and how to read it, in plain sentences."""
    drawing: Figure

    def save(self, folder: Path) -> Path:
        """Write the SVG file: text as outlines and no date, so that the same rows give the same bytes."""
        path = folder / f"{self.name}.svg"
        FigureCanvasSVG(self.drawing)
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            self.drawing.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
        return path


def canvas(height: float, rows: int = 1, columns: int = 1, **extra: Any) -> tuple[Figure, list[Axes]]:
    """Return a drawing of the common width, and its axes in row order."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **extra).flat)


def legend(figure: Figure, axes: Axes, handles: Sequence[Any] = ()) -> None:
    """Add a legend of `handles` and of labeled artists above a drawing, in two columns if labels are short."""
    own, _ = axes.get_legend_handles_labels()
    every = [*handles, *own]
    labels = [str(handle.get_label()) for handle in every]
    columns = 2 if max(map(len, labels), default=0) <= 34 else 1
    figure.legend(every, labels, loc="outside upper left", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.17 * -(-len(labels) // columns))


@styled
def speedups(comparison: Comparison, every: Iterable[str]) -> Plot | None:
    """Draw a dot for each method and category, with a line over the middle half of the prompts, fastest first. `every`
    lists all methods of the report, which determine the colors. Returns None if there are no speedups.
    """
    look_of, baseline = line_styles(every), comparison.baseline
    shown = comparison.figures["speedup"].dropna().drop(index=baseline or [])
    shown = shown.sort_values(ascending=False, kind="stable").index
    if shown.empty or baseline is None:
        return None
    several = comparison.categories if len(comparison.categories) > 1 else []
    rows = {
        "all prompts": comparison.figures,
        **{heading(name): comparison.by_category.loc[name] for name in several},
    }
    figure, (axes,) = canvas(0.7 + len(rows) * (0.09 * len(shown) + 0.15))
    axes.axvline(1, color=GREY, linewidth=1)
    for row, figures in enumerate(rows.values()):
        for index, (method, line) in enumerate(figures.reindex(shown).iterrows()):
            height, look = row - 0.4 + 0.8 * (index + 0.5) / len(shown), look_of[str(method)]
            axes.plot([line["lower"], line["upper"]], [height, height], color=look.color, linewidth=1)
            label = f"{comparison.labels[str(method)]}: {line['speedup']:.2f}" if row == 0 else None
            axes.plot(line["speedup"], height, look.marker, color=look.color, markersize=5, label=label)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(ylim=(len(rows) - 0.45, -0.55), xlabel=f"speedup over {comparison.labels[baseline]}")
    axes.grid(False, axis="y")
    legend(figure, axes)
    caption = "Dots: all prompts of a category together. Lines: the middle half of the prompts."
    return Plot(f"speedup_{comparison.mode}", "Speedup by category", caption, figure)


@styled
def acceptance(comparison: Comparison) -> Plot | None:
    """Draw a panel for each method that drafts: rows are depths, columns ranks; None if nothing was drafted."""
    shares = comparison.acceptance
    methods = [method for method in comparison.labels if method in shares.index.get_level_values("method")]
    if not methods:
        return None
    depths = range(1, min(_DEPTHS, shares.index.get_level_values("depth").max()) + 1)
    rows = -(-len(methods) // 2)
    figure, panels = canvas(0.9 + rows * (0.55 + 0.19 * len(depths)), rows, 2)
    for axes in panels[len(methods) :]:
        axes.set_visible(False)
    for axes, method in zip(panels, methods, strict=False):
        grid = 100 * shares[method].unstack("rank").reindex(index=depths, columns=range(_RANKS))
        across, down = range(_RANKS), range(len(depths))
        mesh = axes.pcolormesh(across, down, grid, cmap="Blues", vmin=0, vmax=100, shading="nearest")
        axes.invert_yaxis()
        axes.set_xticks(across)
        axes.set_yticks(down, list(map(str, depths)))
        axes.set_title(comparison.labels[method], wrap=True)
        axes.grid(False)
    figure.colorbar(mesh, ax=panels, label="accepted (%)", location="bottom", aspect=50)
    figure.supxlabel("rank among the candidates of the parent", fontsize=9)
    figure.supylabel("depth", fontsize=9)
    caption = (
        "Accepted nodes as a fraction of drafted nodes whose parent was accepted; blank where nothing was drafted. "
        f"Depths beyond {_DEPTHS} and ranks beyond {_RANKS - 1} are omitted."
    )
    return Plot(f"acceptance_{comparison.mode}", "Acceptance by depth and rank", caption, figure)


@styled
def calibration(bins: Sequence[tuple[int, float, float]], rejection_weight: float) -> Plot:
    """Draw the predictions of an acceptance head against the observed acceptance (SpecDec++).

    `bins` are numbers of tokens, mean prediction and mean acceptance; `rejection_weight` is the weight in training.
    """
    figure, (top, bottom) = canvas(4.2, 2, 1, sharex=True, height_ratios=[3, 1])
    acceptances = [percent / 100 for percent in range(101)]
    expected = [share / (share + rejection_weight * (1 - share)) for share in acceptances]
    top.plot([0, 1], [0, 1], color=GREY, linestyle=":", label="the probability itself")
    if rejection_weight != 1:
        top.plot(expected, acceptances, color=GREY, label=f"rejections weigh {rejection_weight:g} times")
    tokens, predicted, accepted = ([values[column] for values in bins] for column in range(3))
    top.plot(predicted, accepted, color=PALETTE[0], marker="o", label="the head, on texts held out")
    bottom.bar(predicted, tokens, width=0.06, color=PALETTE[0])
    top.set_ylabel("accepted")
    bottom.set(xlabel="predicted probability of being accepted", ylabel="tokens")
    legend(figure, top)
    caption = "Drafted tokens by what the head predicts, and how likely the target accepts them. Grey: a perfect head."
    return Plot("calibration", "Calibration of the acceptance head", caption, figure)
