"""The plots of a report. Of methods: speedup by category, accepted lengths, where in the tree drafts are accepted. Of
studies: how MAT and tokens/s follow one setting (Token Recycling, figure 3), how much is discarded and verified
(SpecDec++, figure 4). And what batches gain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from ..row_format import STOPPING
from . import arithmetic, style
from .style import GREY, Look, Plot
from .summary import Comparison, curves
from .words import heading, study_words

_DEPTHS, _RANKS, _LENGTHS = 12, 10, 16
"""Most that is drawn."""


@style.styled()
def draw(found: Comparison, every: Iterable[str]) -> list[Plot | None]:
    """All plots of methods, None where rows have no figures; `every` method of the report has its colour."""
    looks = style.looks(every)
    return [speedups(found, looks), lengths(found, looks), places(found)]


@style.styled()
def draw_study(name: str, found: Sequence[Comparison], mode: str, every: Iterable[str]) -> list[Plot | None]:
    """The plot of a study, where it varies something."""
    return [study(name, found, style.looks(every))]


@style.styled()
def draw_batches(found: Sequence[Comparison], every: Iterable[str]) -> list[Plot | None]:
    """The plot of batches, where methods have a speedup."""
    return [batches(found, style.looks(every))]


def speedups(found: Comparison, looks: Mapping[str, Look]) -> Plot | None:
    """A dot for each method and category, with a line over the middle half of the prompts, the fastest first."""
    shown = found.figures["speedup"].dropna().drop(index=found.baseline or [])
    shown = shown.sort_values(ascending=False, kind="stable").index
    if shown.empty or found.baseline is None:
        return None
    several = found.categories if len(found.categories) > 1 else []
    rows = {"all prompts": found.figures, **{heading(name): found.by_category.loc[name] for name in several}}
    figure, (axes,) = style.canvas(0.7 + len(rows) * (0.09 * len(shown) + 0.15))
    axes.axvline(1, color=GREY)
    for row, figures in enumerate(rows.values()):
        for place, (method, line) in enumerate(figures.reindex(shown).iterrows()):
            height, look = row - 0.4 + 0.8 * (place + 0.5) / len(shown), looks[str(method)]
            axes.plot([line["lower"], line["upper"]], [height, height], color=look.colour, linewidth=1)
            label = f"{found.labels[str(method)]}: {line['speedup']:.2f}" if row == 0 else None
            axes.plot(line["speedup"], height, look.marker, color=look.colour, markersize=5, label=label)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(ylim=(len(rows) - 0.45, -0.55), xlabel=f"speedup over {found.labels[found.baseline]}")
    axes.grid(False, axis="y")
    style.legend(figure, axes)
    said = "Dots: all prompts of a category together. Lines: the middle half of the prompts."
    return Plot(f"speedup_{found.mode}", "Speedup by category", said, figure)


def lengths(found: Comparison, looks: Mapping[str, Look]) -> Plot | None:
    """Share of the steps that gave at least n tokens."""
    shares = arithmetic.lengths(found.rows)
    least = shares.iloc[:, ::-1].cumsum(axis=1).iloc[:, ::-1]
    least = least[[length for length in least if length <= _LENGTHS]]
    shown = [method for method in found.labels if method in least.index and (least.loc[method] > 0).sum() > 1]
    if not shown:
        return None
    figure, (axes,) = style.canvas(2.8)
    for method in shown:
        look, label = looks[method], f"{found.labels[method]}: {found.figures['mat'][method]:.2f}"
        known = least.loc[method].loc[lambda share: share > 0]
        axes.plot(known.index, known, color=look.colour, marker=look.marker, markersize=4, label=label)
    axes.set(xlabel="tokens", ylabel="share of the steps")
    style.legend(figure, axes)
    said = "Share of the steps that gave at least so many tokens, the model's own token included; with the mean (MAT)."
    return Plot(f"lengths_{found.mode}", "Tokens of a step", said, figure)


def places(found: Comparison) -> Plot | None:
    """A panel for each method that drafts: rows are depths, columns ranks."""
    shares = arithmetic.places(found.rows)
    shown = [method for method in found.labels if method in shares.index.get_level_values("method")]
    if not shown:
        return None
    depths = range(1, min(_DEPTHS, shares.index.get_level_values("depth").max()) + 1)
    rows = -(-len(shown) // 2)
    figure, panels = style.canvas(0.9 + rows * (0.55 + 0.19 * len(depths)), rows, 2)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, method in zip(panels, shown, strict=False):
        grid = 100 * shares[method].unstack("rank").reindex(index=depths, columns=range(_RANKS))
        across, down = range(_RANKS), range(len(depths))
        mesh = axes.pcolormesh(across, down, grid, cmap="Blues", vmin=0, vmax=100, shading="nearest")
        axes.invert_yaxis()
        axes.set_xticks(across)
        axes.set_yticks(down, list(map(str, depths)))
        axes.set_title(style.wrapped(found.labels[method]))
        axes.grid(False)
    figure.colorbar(mesh, ax=panels, label="accepted (%)", location="bottom", aspect=50)
    figure.supxlabel("rank among the candidates of the parent", fontsize=9)
    figure.supylabel("depth", fontsize=9)
    said = "Accepted nodes as a share of the drafted ones whose parent was accepted. A blank place was never drafted"
    beyond = f"depths beyond {_DEPTHS} and ranks beyond {_RANKS - 1} are left out"
    return Plot(f"places_{found.mode}", "Acceptance by depth and rank", f"{said}; {beyond}.", figure)


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
            axes.plot("discard_rate", "verification_rate", data=known, color=colours[curve], marker="o", label=curve)
            for line in known.dropna(subset=["discard_rate", "verification_rate"]).itertuples():
                place = (line.discard_rate, line.verification_rate)
                axes.annotate(line.point, place, (0, 5), textcoords="offset points", ha="center", fontsize=7.5)
        axes.set(xlabel="discard rate", ylabel="verification rate")
        style.legend(figure, axes)
        how = "Left: less is drafted in vain. Down: fewer passes of the target. Both for each emitted token."
        return Plot(file, said.title, how, figure)
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
    return Plot(file, said.title, "Tokens/s of decoding alone.", figure)


def _baseline(points: Sequence[Comparison]) -> dict[str, pd.Series | float]:
    """Tokens/s of the baseline, measured at every point or once for all, under its label."""
    speeds = {each.point: each.figures["decoding"][each.baseline] for each in points if each.baseline}
    labels = [each.labels[each.baseline] for each in points if each.baseline]
    return {labels[0]: speeds[None] if list(speeds) == [None] else pd.Series(speeds)} if speeds else {}


def batches(found: Sequence[Comparison], looks: Mapping[str, Look]) -> Plot | None:
    """Speedup over the batch size."""
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
    axes.set(xlabel="batch size", ylabel="speedup")
    style.legend(figure, axes)
    said = "Against the baseline with the same batch size, the grey line."
    return Plot("batches", "Speedup by batch", said, figure)
