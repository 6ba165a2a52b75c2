"""Plots that compare methods on the same prompts: speedup by category, accepted lengths, time per part of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, cycle

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from ..summary import Comparison, Result
from ..words import heading
from . import style
from .style import GREY, GRID, INK, MUTED, PAPER, Look, Plot


def speedups(found: Comparison, looks: Mapping[str, Look]) -> Plot | None:
    """A dot for each method and category, with a line over the middle half of the prompts, the fastest first; where
    there is one category only, every method has a row with its name.
    """
    shown = sorted(
        (each for each in found.results if each.speedup is not None and not each.is_baseline),
        key=lambda each: -(each.speedup or 0.0),
    )
    if not shown or found.baseline is None:
        return None
    several, against = len(found.categories) > 1, found.baseline.label
    if several:
        categories = [name for name in found.categories if any(each.of(name).pairs for each in shown)]
        rows = [shown, *([each.of(name) for each in shown] for name in categories)]
        labels = ["all prompts", *map(heading, categories)]
        row_height, more, step, border = max(0.34, 0.105 * len(shown) + 0.1), 0.09 * len(shown), 0.8 / len(shown), 0.5
    else:
        rows = [shown]
        labels = [style.wrapped(each.label) for each in shown]
        row_height, more, step, border = style.height(labels), 0.0, 1.0, 0.45
    figure, (axes,) = style.canvas(0.6 + len(labels) * row_height + more)
    axes.axvline(1, color=GREY, linewidth=1.2)
    for row, results in enumerate(rows):
        if row % 2:
            axes.axhspan(row - 0.5, row + 0.5, color=GRID, alpha=0.35, linewidth=0)
        for place, result in enumerate(results):
            height = row - (0.4 if several else 0.5) + (place + 0.5) * step
            _dot(axes, result, height, looks[result.method], numbered=row == 0)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - border, border - 1)
    axes.set_xlim(left=min(0.8, axes.get_xlim()[0]))
    axes.set_xlabel(f"speedup over {against}")
    style.ruled(axes, "x")
    if several:
        style.legend(figure, [style.key(each.label, looks[each.method]) for each in shown])
    title, dots = ("Speedup by category", "all prompts of a category") if several else ("Speedup", "all prompts")
    said = f"Dots: {dots} together, against {against}. Lines: the middle half of the prompts."
    return Plot(f"speedup_{found.mode}", title, said, figure)


def _dot(axes: Axes, result: Result, height: float, look: Look, numbered: bool) -> None:
    if result.speedup is None or result.spread is None:
        return
    lower, upper = result.spread.lower, result.spread.upper
    axes.plot([lower, upper], [height] * 2, color=look.colour, linewidth=1.2, alpha=0.7)
    axes.plot(result.speedup, height, look.marker, color=look.colour)
    if numbered:
        axes.annotate(
            f"{result.speedup:.2f}",
            (max(upper, result.speedup), height),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=7.5,
        )


def lengths(found: Comparison, looks: Mapping[str, Look]) -> Plot | None:
    """A small histogram for each method, of how many tokens its steps gave."""
    shown = [each for each in found.results if max(each.lengths, default=1) > 1]
    if not shown:
        return None
    figure, every = style.panels([each.label for each in shown], 0.35, 1.15)
    last = _last_length(shown)
    for axes, result in zip(every, shown, strict=False):
        _histogram(axes, result, looks[result.method], last)
    figure.supxlabel("tokens of a step", fontsize=9, color=MUTED)
    return Plot(
        f"lengths_{found.mode}",
        "Tokens of a step",
        "Share of the steps that gave so many tokens, the model's own token included; the line is the mean (MAT).",
        figure,
    )


def _last_length(shown: Sequence[Result]) -> int:
    """The longest length that a plot shows alone: all but one step in a hundred are shorter."""
    last = 2
    for result in shown:
        lengths = sorted(result.lengths, reverse=True)
        longer = accumulate(result.lengths[length] for length in lengths)
        last = max(last, next(length for length, share in zip(lengths, longer, strict=True) if share > 0.01))
    return min(last, 24)


def _histogram(axes: Axes, result: Result, look: Look, last: int) -> None:
    shares = [result.lengths.get(length, 0.0) for length in range(1, last + 1)]
    beyond = sum(share for length, share in result.lengths.items() if length > last)
    axes.bar(range(1, last + 2), [*shares, beyond], width=0.82, color=look.colour)
    mean = result.mat or 0.0
    axes.axvline(min(mean, last + 1), color=INK, linewidth=1)
    axes.annotate(
        f"{mean:.2f}",
        (min(mean, last + 1), 1),
        xycoords=("data", "axes fraction"),
        xytext=(3, -2),
        textcoords="offset points",
        va="top",
        fontsize=8,
    )
    axes.set_title(style.wrapped(result.label), fontsize=8.5)
    every = 1 if last <= 9 else 2 if last <= 16 else 4
    ticks = [tick for tick in range(1, last + 1, every) if every == 1 or tick < last]
    axes.set_xticks([*ticks, last + 1], [*map(str, ticks), f">{last}"])
    axes.yaxis.set_major_formatter(PercentFormatter(1, 0))
    style.ruled(axes, "y")


def parts(results: Sequence[Result], name: str) -> Plot | None:
    """Stacked milliseconds of a step: all of it, and beside it what lies outside the model."""
    shown = [each for each in results if each.parts]
    if not shown:
        return None
    names = list(dict.fromkeys(part for each in shown for part in each.parts))
    rest = cycle(style.PALETTE)
    colours = {part: GREY if part == "forward" else next(rest) for part in names}
    named = [style.wrapped(each.label, 28) for each in shown]
    figure, (whole, outside) = style.canvas(
        0.75 + style.height(named) * len(shown) + 0.2 * (len(names) > 3), 1, 2, sharey=True, width_ratios=(1.25, 1)
    )
    for axes, drawn in ((whole, names), (outside, [part for part in names if part != "forward"])):
        for row, result in enumerate(shown):
            left = 0.0
            for part in drawn:
                width = 1000 * result.parts.get(part, 0.0)
                axes.barh(row, width, left=left, height=0.62, color=colours[part], edgecolor=PAPER, linewidth=0.5)
                left += width
        axes.margins(x=0.02)
        style.ruled(axes, "x")
    whole.set_yticks(range(len(shown)), named)
    whole.set_ylim(len(shown) - 0.45, -0.55)
    whole.set_xlabel("ms a step")
    outside.set_xlabel("ms outside the model")
    figure.legend(
        handles=[Patch(color=colours[part], label=part) for part in names],
        loc="outside upper left",
        ncols=3,
        borderaxespad=0.1,
    )
    return Plot(
        name,
        "Time per part of a step",
        "Left: the whole step. Right: the same without the model's forward pass, on a scale of its own.",
        figure,
    )
