"""Plots of the studies: how MAT and tokens/s follow one setting (Token Recycling, figure 3), how much is discarded and
verified (SpecDec++, figure 4), and what batches gain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..arithmetic import grouped
from ..summary import Comparison, Curve, curves
from ..words import study_words
from . import style
from .style import GREY, PAPER, Look, Plot


def study(points: Sequence[Comparison], looks: Mapping[str, Look]) -> Plot | None:
    """MAT above, tokens/s below, over the points of a study: lines where points are numbers, else bars."""
    found = curves(points)
    if not found:
        return None
    order = list(dict.fromkeys(each.point for each in points if each.point is not None))
    numbers = all(map(_is_number, order))
    figure, (top, bottom) = style.canvas(3.5 if numbers else 3.1, 2, 1, sharex=True)
    colours = _colours(found, looks)
    for axes, label, value in ((top, "MAT", "mat"), (bottom, "tokens/s", "decoding")):
        for place, (curve, measured) in enumerate(found.items()):
            known = [(point, number) for point, result in measured if (number := getattr(result, value)) is not None]
            if numbers:
                _line(axes, [(float(point), number) for point, number in known], colours[curve])
            else:
                _bars(axes, [(order.index(point), number) for point, number in known], colours[curve], place, found)
        axes.set_ylabel(label)
        style.ruled(axes, "y")
    entries = [style.key(curve, colours[curve], line=numbers) for curve in found]
    if against := _baseline(bottom, points, order, numbers):
        entries.append(Line2D([], [], color=GREY, linewidth=1.2, label=against))
    if len(entries) > 1:
        style.legend(figure, entries)
    _points_axis(bottom, order, numbers)
    bottom.set_xlabel(study_words(str(points[0].study)).axis)
    return _study_plot(points[0], "Tokens/s of decoding alone.", figure)


def _study_plot(point: Comparison, how: str, figure: Figure) -> Plot:
    """The plot of a study that the point belongs to; `how` says how to read it."""
    name = str(point.study)
    said, file = study_words(name), re.sub(r"[^\w-]+", "_", name)
    return Plot(f"study_{file}_{point.mode}", said.title, f"{said.what} {how}".strip(), figure)


def _baseline(axes: Axes, points: Sequence[Comparison], order: Sequence[str], numbers: bool) -> str | None:
    """Draws the baseline's tokens/s where it was measured, once or at every point; returns its label."""
    look: Any = {"color": GREY, "linewidth": 1.2}
    label, line = None, []
    for each in points:
        if each.baseline is None or each.baseline.decoding is None:
            continue
        label, speed = each.baseline.label, each.baseline.decoding
        if each.point is None:
            axes.axhline(speed, zorder=0.9, **look)
        elif numbers:
            line.append((float(each.point), speed))
        else:
            middle = order.index(each.point)
            axes.plot([middle - 0.4, middle + 0.4], [speed] * 2, zorder=0.9, **look)
    axes.plot([point for point, _ in line], [speed for _, speed in line], **look)
    return label


def _points_axis(axes: Axes, order: Sequence[str], numbers: bool) -> None:
    """A tick at every point that was measured, on a logarithmic axis where they spread far."""
    if not numbers:
        axes.set_xticks(range(len(order)), order)
        axes.set_xlim(-0.6, len(order) - 0.4)
        return
    places = [float(point) for point in order]
    if min(places) > 0 and max(places) >= 8 * min(places):
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
    axes.set_xticks(places, order)


def _line(axes: Axes, known: list[tuple[float, float]], look: Look) -> None:
    known = sorted(known)
    axes.plot([point for point, _ in known], [value for _, value in known], color=look.colour, marker=look.marker)
    axes.margins(y=0.18)


def _bars(axes: Axes, known: list[tuple[int, float]], look: Look, place: int, found: Mapping[str, Curve]) -> None:
    width = min(0.8 / len(found), 0.28)
    across = [point + (place - (len(found) - 1) / 2) * width for point, _ in known]
    bars = axes.bar(across, [value for _, value in known], width=0.92 * width, color=look.colour)
    for label in axes.bar_label(bars, fmt="%.3g", fontsize=7.5, padding=2):
        label.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 0.6})  # over the line of the baseline
    axes.margins(y=0.16)


def trade_off(studies: Mapping[tuple[str, str], Sequence[Comparison]], mode: str) -> Plot | None:
    """MAT against tokens/s where the size of the tree changes: more is accepted, and every step takes longer."""
    lines = []
    for (of_mode, name), points in studies.items():
        found = curves(points)
        for curve, measured in found.items():
            sizes = [result.nodes - 1 for _, result in measured if result.nodes]
            if of_mode == mode and len(sizes) > 2 and max(sizes) >= 1.5 * min(sizes):
                lines.append((f"{study_words(name).title}" + (f", {curve}" if len(found) > 1 else ""), measured))
    if not lines:
        return None
    figure, (axes,) = style.canvas(3.5)
    for (name, measured), colour in zip(lines, list(style.PALETTE) * len(lines), strict=False):
        known = [
            (result.mat, result.decoding, f"{result.nodes - 1:.0f}")
            for _, result in measured
            if result.mat and result.decoding and result.nodes
        ]
        _numbered(axes, known, 5, color=colour, marker="o", label=name)
    axes.set(xlabel="MAT, tokens a step", ylabel="tokens/s")
    axes.grid(True)
    axes.margins(0.08, 0.12)
    style.legend(figure, axes.get_legend_handles_labels()[0])
    return Plot(
        f"tree_size_{mode}",
        "MAT against tokens/s over tree size",
        "Every dot is a tree, its number the mean drafted nodes of a step. Right: more accepted. Up: faster.",
        figure,
    )


def pareto(points: Sequence[Comparison], looks: Mapping[str, Look]) -> Plot | None:
    """Verification rate over discard rate: a curve for each way to stop drafting, a dot a length or threshold."""
    found = curves(points)
    drawn = {
        curve: [
            (result.discard_rate, result.verification_rate, _shortened(point))
            for point, result in measured
            if result.discard_rate is not None and result.verification_rate is not None
        ]
        for curve, measured in found.items()
    }
    if not any(drawn.values()):
        return None
    colours = _colours(found, looks)
    figure, (axes,) = style.canvas(3.8)
    for place, (curve, known) in enumerate(drawn.items()):
        _numbered(axes, known, -11 if place % 2 else 5, color=colours[curve].colour, marker=colours[curve].marker)
    axes.set(xlabel="discard rate", ylabel="verification rate")
    axes.grid(True)
    axes.margins(0.06, 0.1)
    style.legend(figure, [style.key(curve, colours[curve], line=True) for curve in drawn])
    how = "Left: less is drafted in vain. Down: fewer passes of the target. Both for each emitted token."
    return _study_plot(points[0], how, figure)


def _numbered(axes: Axes, known: Sequence[tuple[float, float, str]], above: int, **look: Any) -> None:
    """A line through dots, each with a text some points above it."""
    axes.plot([x for x, _, _ in known], [y for _, y, _ in known], **look)
    for x, y, text in known:
        axes.annotate(text, (x, y), xytext=(0, above), textcoords="offset points", ha="center", fontsize=7.5)


def _shortened(point: str) -> str:
    """The number of a point, if it has one."""
    number = re.search(r"[\d.]+", point)
    return number.group() if number else point


def _colours(found: Mapping[str, Curve], looks: Mapping[str, Look]) -> dict[str, Look]:
    """A look for every curve: that of its name, else of its first method."""
    return {curve: looks.get(curve, looks[measured[0][1].method]) for curve, measured in found.items()}


def batches(found: Sequence[Comparison], looks: Mapping[str, Look]) -> Plot | None:
    """Speedup over the number of texts at once."""
    raced = [(each.batch, result) for each in found for result in each.results if not result.is_baseline]
    lines = grouped([each for each in raced if each[1].speedup is not None], lambda each: each[1].method)
    if not lines:
        return None
    sizes = sorted({each.batch for each in found})
    figure, (axes,) = style.canvas(2.9)
    axes.axhline(1, color=GREY, linewidth=1.2)
    for method, measured in lines.items():
        _line(axes, [(float(size), result.speedup or 0.0) for size, result in measured], looks[method])
    if len(sizes) > 1:
        axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, list(map(str, sizes)))
    axes.minorticks_off()
    axes.set(xlabel="texts at once", ylabel="speedup")
    style.ruled(axes, "y")
    style.legend(figure, [style.key(of[0][1].label, looks[method], line=True) for method, of in lines.items()])
    return Plot(
        "batches",
        "Speedup by batch",
        "Against the baseline with as many texts at once; the grey line is the baseline.",
        figure,
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
