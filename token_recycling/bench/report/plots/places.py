"""Where in the tree drafts are accepted: a heat map by depth and rank, and on the tree itself where rows have paths."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from ..arithmetic import NodeAcceptance, grouped
from ..summary import Comparison, Result
from . import style
from .style import GRID, HEAT, INK, MUTED, PAPER, Plot

_STEPS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
"""Bounds of the shades: finer where shares are small, as most are."""
_SHADES = list(HEAT)
_DEPTHS, _RANKS, _NODES = 12, 10, 120
"""Most that is drawn."""
_LEAF, _LAYER, _GAP = 0.26, 0.25, 0.25
"""Inches between leaves at most, between layers, between trees."""

Path = tuple[int, ...]


def grids(found: Comparison) -> Plot | None:
    """A panel for each method that drafts: rows are depths, columns ranks."""
    shown = [each for each in found.results if each.by_place]
    if not shown:
        return None
    deepest = max(depth for each in shown for depth, _ in each.by_place)
    broadest = max(rank for each in shown for _, rank in each.by_place)
    depths, ranks = min(_DEPTHS, deepest), min(_RANKS, 1 + broadest)
    figure, every = style.panels([each.label for each in shown], 0.75, 0.5 + 0.19 * depths)
    for axes, result in zip(every, shown, strict=False):
        _grid(axes, result, depths, ranks)
    for axes in every[::2]:
        axes.set_ylabel("depth")
    figure.supxlabel("rank among the candidates of the parent", fontsize=9, color=MUTED)
    _shades(figure)
    said = "Percent of the drafted nodes that were accepted, of those whose parent was. A blank place was never drafted"
    beyond = [f"depths beyond {depths}"] if deepest > depths else []
    beyond += [f"ranks beyond {ranks - 1}"] if broadest >= ranks else []
    if beyond:
        said += f"; {' and '.join(beyond)} are left out"
    return Plot(f"places_{found.mode}", "Acceptance by depth and rank", f"{said}.", figure)


def _grid(axes: Axes, result: Result, depths: int, ranks: int) -> None:
    for (depth, rank), place in result.by_place.items():
        if depth > depths or rank >= ranks:
            continue
        shade = _shade(place.share)
        axes.add_patch(Rectangle((rank - 0.47, depth - 0.46), 0.94, 0.92, facecolor=_SHADES[shade], linewidth=0))
        ink = INK if shade < 4 else PAPER
        axes.text(rank, depth, _percent(place.share), ha="center", va="center_baseline", fontsize=7, color=ink)
    axes.set(xticks=range(ranks), yticks=range(1, depths + 1), xlim=(-0.6, ranks - 0.4), ylim=(depths + 0.6, 0.4))
    axes.spines[:].set_visible(False)
    axes.set_title(style.wrapped(result.label), fontsize=8.5)


def trees(found: Comparison) -> Plot | None:
    """The tree of each method whose rows have paths: shade is acceptance, area how often a node could be accepted."""
    panels = [_Panel.of(each) for each in found.results if each.by_path]
    if not panels:
        return None
    rows = _packed(panels, style.WIDTH)
    titles = [0.3 + style.room(panel.label for panel in row) for row in rows]
    heights = [title + max(panel.height for panel in row) + 0.2 for row, title in zip(rows, titles, strict=True)]
    top = sum(heights)
    width, whole = style.WIDTH, 0.3 + top
    figure = Figure(figsize=(width, whole))
    for row, title, height in zip(rows, titles, heights, strict=True):
        left = 0.0
        for panel in row:
            bottom = top - title - panel.height
            box = (left / width, bottom / whole, panel.width / width, panel.height / whole)
            _tree(figure.add_axes(box), panel)
            left += panel.width + _GAP
        top -= height
    _shades(figure)
    return Plot(
        f"trees_{found.mode}",
        "Acceptance on the tree",
        "The root on top, the best candidate on the left. Shade: how often a node was accepted where its parent was. "
        "Area: how often it could have been. Trees that differ from step to step are laid over each other.",
        figure,
    )


@dataclass
class _Panel:
    """One method's tree, and the room that it takes in inches."""

    label: str
    nodes: dict[Path, NodeAcceptance]
    across: dict[Path, float]
    """Where nodes stand from left to right, in leaves."""
    steps: int

    @classmethod
    def of(cls, result: Result) -> _Panel:
        nodes = _most_tried(result.by_path)
        steps = sum(row["steps"] for row in result.rows if row.get("paths"))
        return cls(result.label, nodes, _across(list(nodes)), steps)

    @property
    def layers(self) -> int:
        return 1 + max(map(len, self.nodes))

    @property
    def height(self) -> float:
        return _LAYER * self.layers

    @property
    def leaf(self) -> float:
        return min(_LEAF, style.WIDTH / (1 + max(self.across.values())))

    @property
    def width(self) -> float:
        leaves = 1 + max(self.across.values())
        return min(style.WIDTH, max(leaves * self.leaf, 0.3 + 0.066 * min(32, len(self.label))))


def _packed(panels: Sequence[_Panel], width: float) -> list[list[_Panel]]:
    """Panels beside each other as far as they find room, each in the first row that has it."""
    rows: list[list[_Panel]] = []
    for panel in panels:
        room = (row for row in rows if sum(each.width + _GAP for each in row) + panel.width <= width)
        if (row := next(room, None)) is None:
            rows.append(row := [])
        row.append(panel)
    return rows


def _most_tried(places: dict[Path, NodeAcceptance]) -> dict[Path, NodeAcceptance]:
    """The nodes to draw, by depth: those tried most, and of them those that all before are known of."""
    within = [path for path in places if len(path) <= _DEPTHS]
    most = sorted(within, key=lambda path: (-places[path].tried, len(path), path))[:_NODES]
    kept: dict[Path, NodeAcceptance] = {}
    for path in sorted(most, key=lambda path: (len(path), path)):
        if path[:-1] in kept or len(path) == 1:
            kept[path] = places[path]
    return kept


def _across(paths: Sequence[Path]) -> dict[Path, float]:
    """Where nodes stand from left to right: leaves side by side, a parent over the middle of its children."""
    children = grouped(paths, lambda path: path[:-1])
    across: dict[Path, float] = {}
    leaves = count()

    def stand(path: Path) -> float:
        below = [stand(child) for child in children.get(path, ())]
        across[path] = (below[0] + below[-1]) / 2 if below else next(leaves)
        return across[path]

    stand(())
    return across


def _tree(axes: Axes, panel: _Panel) -> None:
    across, nodes = panel.across, panel.nodes
    for path in nodes:
        axes.plot([across[path[:-1]], across[path]], [len(path) - 1, len(path)], color=GRID, linewidth=0.9, zorder=1)
    axes.scatter([across[()]], [0], s=62, color=INK, zorder=2)
    axes.scatter(
        [across[path] for path in nodes],
        [len(path) for path in nodes],
        s=[9 + 53 * min(1.0, place.tried / max(1, panel.steps)) for place in nodes.values()],
        c=[_SHADES[_shade(place.share)] for place in nodes.values()],
        edgecolors=MUTED,
        linewidths=0.5,
        zorder=2,
    )
    axes.set_xlim(-0.5, -0.5 + panel.width / panel.leaf)
    axes.set_ylim(panel.layers - 0.5, -0.5)
    axes.set_axis_off()
    axes.set_title(style.wrapped(panel.label), fontsize=8.5, pad=3)


def _shade(share: float) -> int:
    return bisect_right(_STEPS, share)


def _percent(share: float) -> str:
    return f"{100 * share:.0f}" if share >= 0.095 or not share else f"{100 * share:.1f}"


def _shades(figure: Figure) -> None:
    bounds = [f"{100 * bound:.0f}" for bound in _STEPS]
    labels = [f"< {bounds[0]}", *(f"{a}-{b}" for a, b in pairwise(bounds)), f"> {bounds[-1]} %"]
    shades = zip(HEAT, labels, strict=True)
    patches = [Patch(facecolor=shade, edgecolor=GRID, linewidth=0.5, label=label) for shade, label in shades]
    figure.legend(
        handles=patches,
        loc="outside upper left",
        ncols=len(HEAT),
        borderaxespad=0.1,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=0.9,
        fontsize=8,
    )
