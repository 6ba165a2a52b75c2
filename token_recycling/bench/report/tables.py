"""The tables of a report. The first is in the form of the paper's table 1: a line a method, a column a category."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ..row_format import HINDSIGHT
from . import arithmetic, words
from .summary import Comparison, Summary
from .table import NONE, Cell, Table

_COLUMNS = {
    "nodes": ("nodes", "{:.0f}"),
    "drafted": ("drafted", "{:.1f}"),
    "MAT": ("mat", "{:.2f}"),
    "MAT without loops": ("mat_without_loops", "{:.2f}"),
    "discard rate": ("discard_rate", "{:.3f}"),
    "verification rate": ("verification_rate", "{:.3f}"),
    "repeated": ("repeated_4grams", "{:.1%}"),
    "tokens/s": ("decoding", "{:,.1f}"),
    "whole call": ("whole_call", "{:,.1f}"),
    "largest margin": ("largest_margin", "{:.2g}"),
    "failed": ("failures", "{:.0f}"),
    "overhead": ("overhead", "{:.0%}"),
}
"""Heads of columns, with the figure below each and its form; other heads are those of figures with two digits."""


def table_of(
    title: str,
    figures: pd.DataFrame,
    heads: Sequence[str],
    note: str,
    names: Mapping[str, str] | None = None,
    best: Sequence[str] = (),
    within: str | None = None,
) -> Table:
    """A line for each line of figures: columns of `names`, a head and what stands below it, then those of `heads` that
    say anything. The largest figure of the columns in `best` is marked, that of an oracle aside; with `within`, of the
    lines that have the same value there.
    """
    names = names or {"method": "label"}
    cells = {head: [Cell(str(text)) for text in figures[name]] for head, name in names.items()}
    alike = figures[within] if within else pd.Series(0, figures.index)
    bound = figures.index.astype(str).str.startswith(HINDSIGHT)
    for head in heads:
        name, form = _COLUMNS.get(head, (head, "{:.2f}"))
        if head == "identical":
            cells[head] = [
                Cell(f"{same} of {all_}" if all_ else NONE, alarm=same < all_)
                for same, all_ in zip(figures["identical"], figures["compared"], strict=True)
            ]
        elif not is_numeric_dtype(figures[name]):
            cells[head] = [Cell(NONE if pd.isna(text) else text) for text in figures[name]]
        else:
            groups = figures[name].mask(bound).groupby(alike.to_numpy())
            marked = figures[name].eq(groups.transform("max")) & (groups.transform("size") > 1) & (head in best)
            cells[head] = [
                Cell(NONE if pd.isna(value) else form.format(value), most, head == "failed" and value > 0)
                for value, most in zip(figures[name], marked, strict=True)
            ]
    said = {head: column for head, column in cells.items() if {cell.text for cell in column} - {NONE, "0"}}
    rows = [list(row) for row in zip(*said.values(), strict=True)]
    return Table(title, list(said), rows, note, frozenset(range(len(names))))


def speedup_table(found: Comparison, clock: str = "wall") -> Table:
    """Speedup by category and over all, the fastest first, MAT, and tokens/s, as in the paper's table 1."""
    against = f"over {found.labels[found.baseline]}" if found.baseline else "not known: no baseline was measured"
    note = (
        f"Speedup {against}, whole calls, {words.clock_words(clock)}; the middle 95% is that of all prompts drawn "
        f"anew. Tokens/s of {words.timed(clock)}. The best of a column is marked; an oracle is a bound, never the best."
    )
    categories = _by_category(found, "speedup") if len(found.categories) > 1 else pd.DataFrame(index=list(found.labels))
    between = {method: arithmetic.interval(found.pairs_of(method)) for method in found.speedups.index}
    texts = [f"{each[0]:.2f} to {each[1]:.2f}" if (each := between.get(method)) else None for method in found.labels]
    figures = found.figures.join(categories).assign(**{"middle 95%": pd.Series(texts, found.figures.index)})
    figures = figures.sort_values("speedup", ascending=False, kind="stable")
    heads = [*categories, "speedup", "middle 95%", "MAT", "tokens/s"]
    return table_of("Speedup", figures, heads, note, best=heads)


def category_table(found: Comparison) -> Table:
    """Tokens a step of every method, by kind of text and over all."""
    figures = _by_category(found, "mat").assign(all=found.figures["mat"])
    heads = [*figures]
    figures = figures.assign(label=found.figures["label"])
    return table_of("Tokens a step by kind of text", figures, heads, "The best of a column is marked.", best=heads)


def _by_category(found: Comparison, figure: str) -> pd.DataFrame:
    """A figure by method, a column for each category under its heading."""
    every = found.by_category[figure].unstack("category").reindex(index=list(found.labels), columns=found.categories)
    return every.rename(columns=words.heading)


def output_table(found: Comparison) -> Table:
    """What stands behind the speedup: loops, spread, whole calls, identity, failures."""
    quartiles = found.figures[["lower", "median", "upper"]].map("{:.2f}".format).agg(" ".join, axis=1)
    figures = found.figures.assign(quartiles=quartiles.where(found.figures["median"].notna()))
    heads = ["MAT without loops", "repeated", "whole call", "quartiles", "identical", "largest margin", "failed"]
    note = (
        "Repeated: 4-grams that stood in the same output before. Whole call: tokens/s, the prompt included. Quartiles: "
        "lower, median and upper, of the speedups prompt by prompt. Identical: to plain decoding; margin: of the "
        "logits where an output first differs."
    )
    return table_of("Behind the speedup", figures, heads, note)


def parts_table(found: Sequence[Comparison]) -> Table | None:
    """Milliseconds of each part of a step."""
    parts = 1000 * pd.concat([each.parts for each in found])
    if parts.empty:
        return None
    step = parts.sum(axis=1)
    overhead = step / parts.get("forward", float("nan")) - 1
    labels = [each.labels[method] for each in found for method in each.parts.index]
    note = "Milliseconds a step. Overhead: time outside the model's forward pass, as a share of the forward pass."
    figures = parts.assign(step=step, overhead=overhead, label=labels)
    return table_of("Time per part of a step", figures, [*parts, "step", "overhead"], note)


def points_table(
    points: Sequence[Comparison], title: str, axis: str, clock: str = "wall", rates: bool = False
) -> Table:
    """A line for each method at each point of a study, or at each size of a batch; with `rates` as in SpecDec++, figure
    4: what is discarded and verified.
    """
    figures = pd.concat(
        [each.figures.assign(point=str(each.batch) if each.mode == "batch" else each.point or NONE) for each in points]
    )
    heads = ["drafted", *["discard rate", "verification rate"] * rates, "MAT", "MAT without loops", "tokens/s"]
    heads += ["whole call", *["speedup"] * any(len(each.speedups) for each in points), "identical", "failed"]
    note = f"Drafted: mean nodes of a step, the root left out. Tokens/s of {words.timed(clock)}, and of the whole call."
    if rates:
        note += (
            " Discard rate: drafted tokens that were not accepted, an emitted token. Verification rate: forward passes "
            "of the target, an emitted token. Less is better for both."
        )
    return table_of(title, figures, heads, note, {axis: "point", "method": "label"})


def failure_table(summary: Summary) -> Table | None:
    """Failures by message, the most frequent first."""
    every = summary.rows[summary.rows["failure"].notna()]
    if every.empty:
        return None
    alike = every.groupby(every["failure"].str.replace(r"\d+", "#", regex=True), sort=False)
    found = alike.agg(
        message=("failure", "first"),
        labels=("label", lambda labels: ", ".join(labels.unique())),
        prompts=("prompt", lambda prompts: str(prompts.nunique())),
        failures=("failure", "size"),
    ).sort_values("failures", ascending=False, kind="stable")
    names = {"failure": "message", "methods": "labels"}
    note = "Failures alike but for numbers stand in one line."
    return table_of("Failures", found, ["prompts", "failed"], note, names)
