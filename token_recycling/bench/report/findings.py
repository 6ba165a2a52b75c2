"""The findings of a report as a table with confidence intervals, and what a reader must know before believing them."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from . import arithmetic, words
from .arithmetic import TERMS, finished
from .summary import Comparison, Summary
from .tables import Table, escaped

CHEAPER = 1.05
"""Times MAT above which a speedup is questioned: steps then cost less than the baseline's."""
REPETITIVE = 0.5
"""Share of repeated 4-grams above which a report says that the output flatters methods that look back."""
FAR = 1.0
"""Margin of logits that rounding explains in no dtype: the output is wrong."""
CLOSE = 1e-3
"""Margin of logits up to which a divergence in float32 can be a matter of rounding."""


def findings_table(summary: Summary) -> Table | None:
    """The fastest method of each comparison: by how much, on what, and whether it is ahead of the second."""
    lines = [_fastest(each) for each in summary.main if each.baseline is not None and len(each.speedups)]
    note = (
        "Speedup end to end. Ahead of the next: speedup over the second-fastest method on the prompts of both; an "
        "interval that includes 1 does not decide."
    )
    return Table("Fastest method", pd.DataFrame(lines), note, names=2) if lines else None


def _fastest(found: Comparison) -> dict[str, str]:
    best, speedup = found.speedups.index[0], found.speedups.iloc[0]
    pairs = found.pairs_of(best)
    line = {
        "output": escaped(words.place(found)),
        "fastest": escaped(found.labels[best]),
        "speedup": with_interval(speedup, arithmetic.interval(pairs)),
        "MAT": f"{found.figures['mat'][best]:.2f}",
        "prompts": f"{len(pairs):,}",
        "tokens": f"{int(pairs['tokens'].sum()):,}",
        "ahead of the next": "-",
    }
    if len(found.speedups) > 1:
        second = found.speedups.index[1]
        rival = found.pairs_of(second).set_index("prompt")[["tokens", "call_seconds"]]
        both = pairs.drop(columns=TERMS[2:]).join(rival.rename(columns=lambda name: f"base_{name}"), "prompt", "inner")
        ahead = float(arithmetic.speedup(both[TERMS].sum()))
        line["ahead of the next"] = (
            f"{with_interval(ahead, arithmetic.interval(both))} times {escaped(found.labels[second])}"
        )
    return line


def with_interval(value: float, interval: tuple[float, float]) -> str:
    """Return a value with its confidence interval, if one is known."""
    known = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval[1] < float("inf") else ""
    return f"{value:.2f}{known}"


def findings(summary: Summary) -> list[str]:
    """What the table of the fastest does not say: losses, and whether outputs are identical."""
    found = []
    for each in summary.main:
        slower = "; ".join(each.labels[method] for method in each.labels if each.speedups.get(method, 1.0) < 1)
        if slower and each.speedups.max() > 1:
            found.append(f"{words.place(each)}: slower than {each.labels[str(each.baseline)]}: {slower}.")
    identical = summary.rows["identical"].dropna()
    if different := int(identical.eq(False).sum()):
        found.append(f"{different:,} of {len(identical):,} compared outputs differ from plain decoding's.")
    elif len(identical):
        found.append(f"All {len(identical):,} compared outputs are identical to plain decoding's.")
    if failed := len(summary.rows) - len(finished(summary.rows)):
        found.append(f"{words.count(failed, 'run')} failed.")
    return found


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = [*summary.notes]
    for each in summary.comparisons:
        found += _conditions(each)
    for each in summary.main:
        found += _questions(each)
    found += _far_divergences(summary)
    return found


def _conditions(found: Comparison) -> Iterator[str]:
    """What differs between the rows of a comparison, and what is missing."""
    place = words.place(found)
    where = pd.DataFrame([{**known, "date": ""} for known in found.rows["environment"]], dtype=object).astype(str)
    if differing := [f"{key}: {' or '.join(where[key].unique())}" for key in where if where[key].nunique() > 1]:
        yield f"{place}: rows of several environments ({'; '.join(differing)}), whose times do not compare."
    for key in ("temperature", "max_new_tokens", "seed"):
        if len(values := sorted(found.rows[key].astype(str).unique())) > 1:
            yield f"{place}: rows differ in {key} ({', '.join(values)})."
    if found.baseline is None:
        yield f"{place}: no baseline was measured, so there are no speedups."
    counts = found.rows["method"].value_counts()
    every = counts.max()
    if short := [f"{label} ({counts[method]})" for method, label in found.labels.items() if counts[method] < every]:
        yield f"{place}: not every method has all {every} prompts yet: {', '.join(short)}."


def _questions(found: Comparison) -> Iterator[str]:
    """Figures that do not mean what they seem to."""
    odd = [
        f"{found.labels[method]} ({speedup:.2f}, MAT {found.figures['mat'][method]:.2f})"
        for method, speedup in found.speedups.items()
        if speedup > CHEAPER * max(1.0, found.figures["mat"][method])
    ]
    if odd:
        yield (
            f"{words.place(found)}: speedup above MAT: {'; '.join(odd)}. Their steps cost less than the baseline's, as "
            "with prepacked weights, or other programs ran: see `--baseline plain` and `--clock processor`."
        )
    if found.mode == "generate" and (share := found.figures["repeated_4grams"].max()) > REPETITIVE:
        yield (
            f"{words.place(found)}: up to {share:.0%} of the 4-grams are repetitions, which flatters methods that copy "
            "from earlier tokens: see MAT without loops, and replay."
        )


def _far_divergences(summary: Summary) -> Iterator[str]:
    far = summary.rows[summary.rows["margin"] > CLOSE]
    exact = far["environment"].map(lambda known: known.get("dtype") == "float32").astype(bool)
    far = far[exact].sort_values("margin")
    if len(far):
        yield (
            f"{words.count(len(far), 'output')} in float32 {'differs' if len(far) == 1 else 'differ'} from plain "
            f"decoding's by more than rounding explains (margin above {CLOSE:g}): {', '.join(far['label'].unique())}; "
            f"most on {far['prompt'].iloc[-1]}. This is a bug of the method: report it."
        )
