"""Tables of a report. The first one has the form of table 1 of the Token Recycling paper: a row per method, a column
per category.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas.api.types import is_numeric_dtype

from .data import HINDSIGHT
from .summary import Comparison, Summary, heading, interval_of


def clock_words(clock: str) -> str:
    """Return the name of a clock, as the end of a sentence."""
    return "by processor time" if clock == "processor" else "by elapsed time"


def timed_calls(clock: str) -> str:
    """Return the scope of tokens/s: processor time is known only for whole calls."""
    return "decoding" if clock == "wall" else "whole calls"


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, singular or plural."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


NONE = "-"
"""Cell without a figure."""
_COLUMNS = {
    "drafted": ("drafted", "{:.1f}"),
    "MAT": ("mat", "{:.2f}"),
    "MAT without loops": ("mat_without_loops", "{:.2f}"),
    "first quarter": ("mat_first_quarter", "{:.2f}"),
    "last quarter": ("mat_last_quarter", "{:.2f}"),
    "discard rate": ("discard_rate", "{:.3f}"),
    "repeated": ("repeated_4grams", "{:.1%}"),
    "first token (s)": ("first_token", "{:.3f}"),
    "tokens/s": ("decoding", "{:,.1f}"),
    "whole call": ("whole_call", "{:,.1f}"),
    "largest margin": ("largest_margin", "{:.2g}"),
    "failed": ("failures", "{:.0f}"),
    "overhead": ("overhead", "{:.0%}"),
}
"""Column headings, with the figure in each column and its format; other columns have the figure of the same name, with
two decimals.
"""


@dataclass(frozen=True)
class Table:
    """Cells as text; the first `names` columns are names, the others figures."""

    title: str
    frame: pd.DataFrame
    note: str = ""
    names: int = 1

    def markdown(self) -> str:
        """Return the table and its note as Markdown; the caller writes the heading."""
        frame = self.frame.rename(columns=escaped)
        align = ["left"] * self.names + ["right"] * (len(frame.columns) - self.names)
        text = frame.to_markdown(index=False, disable_numparse=True, colalign=align)
        return f"{text}\n\n{self.note}" if self.note else str(text)


def escaped(text: str) -> str:
    """Return text as one line of Markdown, with markup characters and cell borders escaped."""
    for sign in "\\`*_<[|":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def table_of(
    title: str,
    figures: pd.DataFrame,
    heads: Sequence[str],
    note: str,
    names: Mapping[str, str] | None = None,
    best: Sequence[str] = (),
) -> Table:
    """Return a table with a row for each row of figures. `names` maps the headings of the first columns to figures; the
    columns of `heads` follow if they contain a figure. In `best` columns the largest figure is bold, oracles excluded.
    """
    names = names or {"method": "label"}
    cells = {head: [escaped(str(text)) for text in figures[name]] for head, name in names.items()}
    bound = figures.index.astype(str).str.startswith(HINDSIGHT)
    for head in heads:
        name, form = _COLUMNS.get(head, (head, "{:.2f}"))
        if head == "identical":
            column = [
                NONE if not every else f"{same} of {every}" if same == every else f"**{same} of {every}**"
                for same, every in zip(figures["identical"], figures["compared"], strict=True)
            ]
        elif not is_numeric_dtype(figures[name]):
            column = [NONE if pd.isna(text) else escaped(text) for text in figures[name]]
        else:
            raced = figures[name].mask(bound)
            most = raced.max() if head in best and len(figures) > 1 else None
            column = [
                NONE if pd.isna(value) else f"**{form.format(value)}**" if figure == most else form.format(value)
                for value, figure in zip(figures[name], raced, strict=True)
            ]
        if set(column) - {NONE, "0"}:
            cells[head] = column
    return Table(title, pd.DataFrame(cells), note, len(names))


def speedup_table(comparison: Comparison, clock: str = "wall") -> Table:
    """Return speedup by category and overall, fastest first, MAT and tokens/s, as in table 1 of the paper."""
    against = (
        f"over {comparison.labels[comparison.baseline]}" if comparison.baseline else "unknown: no baseline was measured"
    )
    note = (
        f"Speedup {against}, end to end, {clock_words(clock)}; CI over all prompts. Tokens/s of "
        f"{timed_calls(clock)}. The best of a column is bold; oracles are upper bounds and never the best."
    )
    categories = (
        _by_category(comparison, "speedup")
        if len(comparison.categories) > 1
        else pd.DataFrame(index=list(comparison.labels))
    )
    between = {method: interval_of(comparison.pairs_of(method)) for method in comparison.speedups.index}
    texts = [_between(between[method]) if method in between else None for method in comparison.labels]
    figures = comparison.figures.join(categories).assign(**{"95% CI": pd.Series(texts, comparison.figures.index)})
    figures = figures.sort_values("speedup", ascending=False, kind="stable")
    heads = [*categories, "speedup", "95% CI", "MAT", "tokens/s"]
    return table_of("Speedup", figures, heads, note, best=heads)


def _between(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.2f} to {interval[1]:.2f}" if interval[1] < float("inf") else NONE


def category_table(comparison: Comparison) -> Table:
    """Return tokens per step of every method, by category and overall."""
    figures = _by_category(comparison, "mat").assign(all=comparison.figures["mat"])
    heads = [*figures]
    figures = figures.assign(label=comparison.figures["label"])
    return table_of("MAT by category", figures, heads, "The best of a column is bold.", best=heads)


def _by_category(comparison: Comparison, figure: str) -> pd.DataFrame:
    """Return a figure by method, with one column per category."""
    every = (
        comparison.by_category[figure]
        .unstack("category")
        .reindex(index=list(comparison.labels), columns=comparison.categories)
    )
    return every.rename(columns=heading)


def output_table(comparison: Comparison) -> Table:
    """Return details of the outputs: loops, learning, spread, first tokens, identity, failures."""
    quartiles = comparison.figures[["lower", "median", "upper"]].map("{:.2f}".format).agg(" ".join, axis=1)
    figures = comparison.figures.assign(quartiles=quartiles.where(comparison.figures["median"].notna()))
    learning = ["first quarter", "last quarter"] if figures["prompts"].max() >= 8 else []
    heads = ["MAT without loops", *learning, "drafted", "discard rate", "repeated", "first token (s)", "whole call"]
    heads += ["quartiles", "identical", "largest margin", "failed"]
    note = (
        "First and last quarter: MAT of the first and last prompts measured. Drafted: mean nodes per step without the "
        "root; discard rate: rejected nodes per emitted token. Repeated: 4-grams that occurred earlier in the same "
        "output. Whole call: tokens/s, prefill included. Quartiles: of the speedups of single prompts. Identical: "
        "outputs equal to those of plain decoding; margin: between the two logits at the first divergence."
    )
    return table_of("Details", figures, heads, note)


def parts_table(comparisons: Sequence[Comparison]) -> Table | None:
    """Return the milliseconds of each part of a step; None without any."""
    parts = 1000 * pd.concat([each.parts for each in comparisons])
    if parts.empty:
        return None
    step = parts.sum(axis=1)
    overhead = step / parts.get("forward", float("nan")) - 1
    labels = [each.labels[method] for each in comparisons for method in each.parts.index]
    note = "Milliseconds per step. Overhead: time outside the model's forward pass / time of the forward pass."
    figures = parts.assign(step=step, overhead=overhead, label=labels)
    return table_of("Time per part of a step", figures, [*parts, "step", "overhead"], note)


def batch_table(sizes: Sequence[Comparison], clock: str = "wall") -> Table:
    """Return a row for each method at each batch size."""
    figures = pd.concat([each.figures.assign(size=str(each.batch)) for each in sizes])
    note = f"Drafted: mean nodes per step without the root. Tokens/s of {timed_calls(clock)}, and of the whole call."
    heads = ["speedup", "drafted", "MAT", "tokens/s", "whole call", "identical", "failed"]
    return table_of("Batches by size", figures, heads, note, {"batch size": "size", "method": "label"})


def failure_table(summary: Summary) -> Table | None:
    """Return failures by message, most frequent first; None without failures."""
    every = summary.rows[summary.rows["failure"].notna()]
    if every.empty:
        return None
    alike = every.groupby(every["failure"].str.replace(r"\d+", "#", regex=True), sort=False)
    failures = alike.agg(
        message=("failure", "first"),
        labels=("label", lambda labels: ", ".join(labels.unique())),
        prompts=("prompt", lambda prompts: str(prompts.nunique())),
        failures=("failure", "size"),
    ).sort_values("failures", ascending=False, kind="stable")
    names = {"failure": "message", "methods": "labels"}
    return table_of(
        "Failures", failures, ["prompts", "failed"], "Messages that differ only in numbers share a row.", names
    )


def with_interval(value: float, interval: tuple[float, float]) -> str:
    """Return a value with its confidence interval, if the interval is known."""
    limits = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval[1] < float("inf") else ""
    return f"{value:.2f}{limits}"
