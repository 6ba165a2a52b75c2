"""Figures for notebooks: the rendering of `Stats`, `Tree` and `Step` as the last line of a cell, and of whole outputs.

    from token_recycling import mat_over_time, text_by_step

    steps = [step.tokens for step in stream(model, input_ids)]
    text_by_step(tokenizer, steps)

Everything is HTML and SVG with inline style: no scripts, no loaded resources, colors for both light and dark pages. All
content is escaped. The inputs are plain data, so this file is independent of models and the loop.
"""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .text_stream import Decodes, pieces

GREEN, AMBER, BLUE, GREY = "46,134,89", "201,116,20", "58,110,204", "128,138,148"
"""As red, green, blue, to be blended with the page: fills at a fifth, lines opaque."""
_TINTS = (GREEN, BLUE)
_STYLE = (
    "font:14px/1.5 system-ui,sans-serif;color:var(--jp-ui-font-color1,var(--vscode-foreground,inherit));max-width:100%"
)
_MONO = "font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_LETTER, _ROW, _GAP = 7.9, 26, 30
"""Pixels: width of a letter, distance of rows, and gap between the depths of a tree."""


@dataclass(frozen=True)
class Html:
    """A figure: Jupyter renders it as the last line of a cell; `html` is its source."""

    html: str

    def _repr_html_(self) -> str:
        return f'<div style="{_STYLE}">{self.html}</div>'


def visible(text: str) -> str:
    """Return a token's text with visible spaces and line ends."""
    return text.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def tree(parents: Sequence[int], labels: Sequence[str], accepted: Sequence[int] = (), own: str | None = None) -> Html:
    """Draw a tree from left to right, with the accepted path straight along the top of its subtrees.

    `parents` has -1 for the root, node 0; `own` is the token that the model chose after the last accepted node.
    """
    parents, labels, path = [*parents], [*labels], [*accepted]
    if own is not None:
        parents.append(path[-1])
        labels.append(own)
        path.append(len(labels) - 1)
    depths, children = [0], [list[int]() for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        depths.append(depths[parent] + 1)
        children[parent].append(node)
    widths = [_LETTER * _letters(label) + 16 for label in labels]
    columns = [max(width for width, at in zip(widths, depths, strict=True) if at == d) for d in range(max(depths) + 1)]
    left = [1.0, *(1 + x for x in itertools.accumulate(width + _GAP for width in columns))]

    drawn, tops, leaves, waiting = [], [0] * len(parents), 0, [0]
    while waiting:
        # A node is in the row of its first child, and the child on the accepted path comes first.
        node = waiting.pop()
        waiting += sorted(children[node], key=lambda child: (child not in path, child), reverse=True)
        tops[node], leaves = leaves * _ROW + 3, leaves + (not children[node])
        color = GREY if node not in path else AMBER if own is not None and node == path[-1] else GREEN
        if node:
            above = parents[node]
            drawn.append(
                _branch(left[depths[above]] + widths[above], left[depths[node]], tops[above], tops[node], color)
            )
        drawn.append(_box(left[depths[node]], tops[node], widths[node], labels[node], color))
    width, height = left[-1] - _GAP + 1, leaves * _ROW + 2
    return Html(
        f'<div style="overflow:auto;max-height:32em"><svg width="{width:.0f}" height="{height}" role="img" '
        f'aria-label="a draft tree of {len(parents)} nodes" style="{_MONO};fill:currentColor">'
        f"{''.join(drawn)}</svg></div>"
    )


def _branch(start: float, end: float, above: int, below: int, color: str) -> str:
    """Draw a line from the right side of a node to the left side of its child; it bends in the gap before the child."""
    bend = end - _GAP
    return (
        f'<path d="M{start:.0f} {above + 11}H{bend:.0f}C{bend + _GAP / 2:.0f} {above + 11} {bend + _GAP / 2:.0f} '
        f'{below + 11} {end:.0f} {below + 11}" fill="none" stroke="rgb({color})" '
        f'stroke-width="{1 if color == GREY else 2}"/>'
    )


def _box(x: float, y: int, width: float, label: str, color: str) -> str:
    dashed = ' stroke-dasharray="4 3"' if color == AMBER else ""
    return (
        f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="22" rx="5" fill="rgba({color},.16)" '
        f'stroke="rgb({color})"{dashed}/><text x="{x + 8:.0f}" y="{y + 15.5}" xml:space="preserve">'
        f"{escape(label)}</text>"
    )


def text_by_step(tokenizer: Decodes, steps: Sequence[Sequence[int]], prompt: str = "") -> Html:
    """Render an output with one tint per step, stronger for more tokens; `steps` are token ids."""
    shown = [f'<span style="opacity:.6">{escape(prompt)}</span>']
    for number, (text, tokens) in enumerate(zip(pieces(tokenizer, map(list, steps)), steps, strict=True), start=1):
        strength = min(0.1 + 0.07 * len(tokens), 0.6)
        shown.append(
            f'<span title="step {number}: {_count(len(tokens), "token")}" style="border-radius:3px;'
            f'background:rgba({_TINTS[number % 2]},{strength:.2f})">{escape(text)}</span>'
        )
    total = f"{_count(sum(map(len, steps)), 'token')} in {_count(len(steps), 'step')}"
    return Html(
        f'<pre style="{_MONO};line-height:1.6;white-space:pre-wrap;margin:0;color:inherit;background:none">'
        f"{''.join(shown)}</pre>{_small(f'{total}; one tint per step, stronger for more tokens')}"
    )


def mat_over_time(**runs: Sequence[Sequence[int]]) -> Html:
    """Plot the mean accepted tokens per step as sequences grow: one line per run, given as the token ids of its steps.

    A line is the mean of the steps so far; a dot is the tokens of one step, clipped at the upper edge.
    """
    width, height, foot = 640, 220, 22
    counts = {name: [len(step) for step in steps] for name, steps in runs.items()}
    so_far = {name: [*itertools.accumulate(lengths)] for name, lengths in counts.items()}
    means = {name: [sum / number for number, sum in enumerate(sums, start=1)] for name, sums in so_far.items()}
    longest = max((sums[-1] for sums in so_far.values() if sums), default=1)
    highest = 2 + 2 * int(max((max(each, default=1.0) for each in means.values()), default=1.0))

    def at(tokens: float, mat: float) -> str:
        share = min(mat / highest, 1)
        return f"{30 + (width - 40) * tokens / longest:.1f} {8 + (height - foot - 16) * (1 - share):.1f}"

    drawn = []
    for level in range(0, highest + 1, 2):
        y = at(0, level).split()[1]
        line = f'<path d="M30 {y}H{width - 10}" stroke="rgba({GREY},.3)"/>'
        drawn.append(f'{line}<text x="22" y="{y}" dy="4" text-anchor="end">{level}</text>')
    names = []
    for name, color in zip(counts, itertools.cycle((GREEN, AMBER, BLUE)), strict=False):
        dots = "".join(f"M{at(*dot)}h0" for dot in zip(so_far[name], counts[name], strict=True))
        line = "L".join(at(*point) for point in zip(so_far[name], means[name], strict=True))
        drawn.append(
            f'<path d="{dots}" stroke="rgba({color},.45)" stroke-width="5" stroke-linecap="round"/>'
            f'<path d="M{line or at(0, 0)}" fill="none" stroke="rgb({color})" stroke-width="2"/>'
        )
        mat = f"{means[name][-1]:.2f}" if means[name] else "none"
        names.append(f'<b style="color:rgb({color})">●</b> {escape(name)}: MAT {mat}')
    drawn.append(f'<text x="30" y="{height - 4}">tokens</text>')
    drawn.append(f'<text x="{width - 10}" y="{height - 4}" text-anchor="end">{longest:,}</text>')
    return Html(
        f'<div>{" &emsp; ".join(names)}</div><svg viewBox="0 0 {width} {height}" width="{width}" style="max-width:100%;'
        f'font:11px system-ui,sans-serif;fill:currentColor" role="img" aria-label="MAT over time">'
        f"{''.join(drawn)}</svg>" + _small("lines: mean tokens per step so far; dots: tokens of one step")
    )


def figures(head: str, lines: Sequence[str], bars: Mapping[str, Mapping[str, float]]) -> Html:
    """Render a headline, lines below it, and named bars, scaled to the largest of their group."""
    groups = []
    for title, values in bars.items():
        most = max(values.values(), default=0.0) or 1.0
        shown = "".join(
            f'<div style="text-align:right;white-space:nowrap">{escape(name)}</div>'
            '<div style="align-self:center;height:10px;border-radius:2px;min-width:1px;'
            f'width:{100 * value / most:.1f}%;background:rgb({GREEN})"></div>'
            f'<div style="opacity:.7">{_figure(value)}</div>'
            for name, value in values.items()
        )
        groups.append(
            f'<div style="flex:1 1 15em;max-width:22em"><div style="font-weight:600">{escape(title)}</div><div '
            f'style="display:grid;grid-template-columns:max-content 1fr max-content;gap:0 .6em;font-size:12px">{shown}'
            "</div></div>"
        )
    return Html(
        f'<div style="font-size:22px;font-weight:600">{escape(head)}</div>{"".join(map(_small, lines))}'
        f'<div style="display:flex;flex-wrap:wrap;gap:1em 2.5em;margin-top:.6em">{"".join(groups)}</div>'
    )


def _small(text: str) -> str:
    return f'<div style="font-size:12px;opacity:.75">{escape(text)}</div>' if text else ""


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _letters(text: str) -> int:
    """Return how many columns a text takes; East Asian wide characters take two."""
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in text)
