"""Plots of the studies: how MAT and tokens/s follow one setting (Token Recycling, figure 3), how much is discarded and
verified (SpecDec++, figure 4), and what batches gain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes

from ...row_format import STOPPING
from ..summary import Comparison, curves
from ..words import study_words
from . import style
from .methods import parts
from .style import GREY, Look, Plot


def draw(found: Mapping[str, Sequence[Comparison]], mode: str, every: Iterable[str]) -> list[Plot]:
    """A plot for every study of a mode, by name; `every` method of the report has its colour."""
    looks = style.looks(every)
    with style.styled():
        plots = [study(name, points, looks) or parts(points, f"study_{name}_{mode}") for name, points in found.items()]
    return [plot for plot in plots if plot is not None]


def draw_batches(found: Sequence[Comparison], every: Iterable[str]) -> list[Plot]:
    """The plot of batches, where methods have a speedup."""
    with style.styled():
        plot = batches(found, style.looks(every))
    return [] if plot is None else [plot]


def study(name: str, points: Sequence[Comparison], looks: Mapping[str, Look]) -> Plot | None:
    """MAT above, tokens/s below, over the points of a study: lines where points are numbers, else bars. Of the study of
    when to stop it is verification over discard rate.
    """
    found = curves(points)
    if not found:
        return None
    said, file = study_words(name), f"study_{re.sub('[^a-zA-Z0-9_-]+', '_', name)}_{points[0].mode}"
    colours = {curve: looks.get(curve, looks[known["method"].iloc[0]]).colour for curve, known in found.items()}
    if name == STOPPING:
        figure, (axes,) = style.canvas(3.5)
        for curve, known in found.items():
            _dots(axes, known, "discard_rate", "verification_rate", known["point"], colours[curve], curve)
        axes.set(xlabel="discard rate", ylabel="verification rate")
        style.legend(figure, axes)
        how = "Left: less is drafted in vain. Down: fewer passes of the target. Both for each emitted token."
        return Plot(file, said.title, f"{said.what} {how}", figure)
    order = list(dict.fromkeys(each.point for each in points if each.point is not None))
    numbers = pd.to_numeric(pd.Series(order), errors="coerce")
    figure, panels = style.canvas(3.2, 2, 1, sharex=True)
    for axes, column, label in zip(panels, ("mat", "decoding"), ("MAT", "tokens/s"), strict=True):
        values = pd.DataFrame({curve: known.groupby("point")[column].first() for curve, known in found.items()})
        values = values.reindex(order)
        if column == "decoding":
            values = values.assign(**_baseline(points))
        shades = [colours.get(curve, GREY) for curve in values]
        if numbers.isna().any():
            values.plot.bar(ax=axes, color=shades, rot=0, legend=False)
        else:
            values.set_axis(numbers).sort_index().plot(ax=axes, color=shades, marker="o", markersize=4, legend=False)
            axes.set_xticks(numbers, order)
        axes.set(xlabel=said.axis, ylabel=label)
    style.legend(figure, panels[1])
    return Plot(file, said.title, f"{said.what} Tokens/s of decoding alone.".strip(), figure)


def _baseline(points: Sequence[Comparison]) -> dict[str, pd.Series | float]:
    """Tokens/s of the baseline, measured at every point or once for all, under its label."""
    speeds = {each.point: each.figures["decoding"][each.baseline] for each in points if each.baseline}
    labels = [each.labels[each.baseline] for each in points if each.baseline]
    if not speeds:
        return {}
    return {labels[0]: speeds[None] if list(speeds) == [None] else pd.Series(speeds)}


def _dots(axes: Axes, known: pd.DataFrame, x: str, y: str, texts: pd.Series, colour: str, label: str) -> None:
    """A line through dots, each with a text above it."""
    axes.plot(known[x], known[y], color=colour, marker="o", label=label)
    for across, above, text in zip(known[x], known[y], texts, strict=True):
        if across == across and above == above:
            axes.annotate(text, (across, above), xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7.5)


def batches(found: Sequence[Comparison], looks: Mapping[str, Look]) -> Plot | None:
    """Speedup over the number of texts at once."""
    speeds = pd.DataFrame({each.batch: each.speedups for each in found}).T
    if speeds.empty:
        return None
    figure, (axes,) = style.canvas(2.7)
    axes.axhline(1, color=GREY)
    labels = found[0].labels
    colours = [looks[method].colour for method in speeds]
    speeds.rename(columns=labels).plot(ax=axes, color=colours, marker="o", logx=len(speeds) > 1, legend=False)
    axes.set_xticks(speeds.index, map(str, speeds.index))
    axes.minorticks_off()
    axes.set(xlabel="texts at once", ylabel="speedup")
    style.legend(figure, axes)
    said = "Against the baseline with as many texts at once; the grey line is the baseline."
    return Plot("batches", "Speedup by batch", said, figure)
