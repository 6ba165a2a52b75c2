"""Plots that compare methods on the same prompts: speedup by category, accepted lengths, time per part of a step, and
where in the tree drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from .. import arithmetic
from ..words import heading
from . import style
from .style import GREY, INK, PALETTE, Look, Plot

if TYPE_CHECKING:
    from ..summary import Comparison

_DEPTHS, _RANKS, _LENGTHS = 12, 10, 16
"""Most that is drawn."""


def draw(found: Comparison, every: Iterable[str]) -> list[Plot]:
    """All of these plots that the rows have figures for; `every` method of the report has its colour."""
    looks = style.looks(every)
    with style.styled():
        plots = [speedups(found, looks), lengths(found, looks), parts([found], f"parts_{found.mode}"), places(found)]
    return [plot for plot in plots if plot is not None]


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


def parts(found: Sequence[Comparison], name: str) -> Plot | None:
    """Stacked milliseconds of a step: all of it, and beside it what lies outside the model."""
    seconds = pd.concat([each.parts.rename(index=each.labels) for each in found])
    if seconds.empty:
        return None
    shown = (1000 * seconds.fillna(0))[::-1].rename(index=lambda label: style.wrapped(label, 28))
    colours = dict(zip([part for part in shown if part != "forward"], PALETTE, strict=False)) | {"forward": GREY}
    figure, (whole, outside) = style.canvas(0.6 + 0.27 * len(shown), 1, 2, sharey=True)
    rest = shown.drop(columns="forward", errors="ignore")
    for axes, drawn, label in ((whole, shown, "ms a step"), (outside, rest, "ms outside the model")):
        drawn.plot.barh(ax=axes, stacked=True, legend=False, color=[colours[part] for part in drawn], width=0.7)
        axes.set(xlabel=label, ylabel="")
        axes.grid(False, axis="y")
    style.legend(figure, whole)
    said = "Left: the whole step. Right: the same without the model's forward pass, on a scale of its own."
    return Plot(name, "Time per part of a step", said, figure)


def places(found: Comparison) -> Plot | None:
    """A panel for each method that drafts: rows are depths, columns ranks."""
    shares = arithmetic.places(found.rows)
    shown = [method for method in found.labels if method in shares.index.get_level_values("method")]
    if not shown:
        return None
    depths = range(1, min(_DEPTHS, shares.index.get_level_values("depth").max()) + 1)
    rows = -(-len(shown) // 2)
    figure, panels = style.canvas(0.4 + rows * (0.55 + 0.19 * len(depths)), rows, 2)
    for axes in panels[len(shown) :]:
        axes.set_visible(False)
    for axes, method in zip(panels, shown, strict=False):
        grid = 100 * shares[method].unstack("rank").reindex(index=depths, columns=range(_RANKS))
        across, down = range(_RANKS), range(len(depths))
        axes.pcolormesh(across, down, grid, cmap="Blues", vmin=0, vmax=100, shading="nearest")
        axes.invert_yaxis()
        axes.set_xticks(across)
        axes.set_yticks(down, list(map(str, depths)))
        axes.set_title(style.wrapped(found.labels[method]))
        axes.grid(False)
        for (row, column), share in np.ndenumerate(grid.to_numpy()):
            if share == share:
                ink = "white" if share > 55 else INK
                axes.text(column, row, f"{share:.0f}", ha="center", va="center", fontsize=7, color=ink)
    figure.supxlabel("rank among the candidates of the parent", fontsize=9)
    figure.supylabel("depth", fontsize=9)
    said = "Percent of the drafted nodes that were accepted, of those whose parent was. A blank place was never drafted"
    beyond = f"depths beyond {_DEPTHS} and ranks beyond {_RANKS - 1} are left out"
    return Plot(f"places_{found.mode}", "Acceptance by depth and rank", f"{said}; {beyond}.", figure)
