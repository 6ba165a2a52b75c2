"""The plots of a report: speedup by category, accepted lengths, acceptance by depth and rank, speedup by batch size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from . import arithmetic, style
from .style import GREY, Look, Plot
from .summary import Comparison
from .words import heading

_DEPTHS, _RANKS, _LENGTHS = 12, 10, 16
"""Limits of the plots."""


@style.styled()
def draw(found: Comparison, every: Iterable[str]) -> list[Plot | None]:
    """All plots of methods, None where rows have no figures; `every` method of the report has its colour."""
    looks = style.looks(every)
    return [speedups(found, looks), lengths(found, looks), places(found)]


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
