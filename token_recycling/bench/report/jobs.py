"""The table of the README: speedup by job, a table for each run, as a page of its own (`jobs.md`).

A line is a category of prompts, a column a method. Of conversations a second line has the time to the first token of
the last turn, which a prefix cache shortens.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from ..scenario import COLD
from . import arithmetic, words
from .summary import Comparison, Summary
from .tables import NONE, Table, escaped

_FEWEST = 3
"""Requests below which no confidence interval is given."""


def page(summary: Summary) -> str | None:
    """The tables as Markdown; None where nothing was generated on several jobs in several runs."""
    found = [each for each in summary.main if each.mode == "generate" and each.baseline and len(each.categories) > 1]
    if len(found) < 2:
        return None
    parts = ["# Speedup by job"]
    for each in found:
        table = job_table(each, summary.clock)
        parts += [f"## {escaped(table.title)}", table.markdown()]
    return "\n\n".join(parts) + "\n"


def job_table(found: Comparison, clock: str = "wall") -> Table:
    """Speedup of every method over the baseline by category, with the number of requests and output tokens."""
    assert found.baseline is not None
    shown = [method for method in found.labels if method != found.baseline]
    first_tokens = arithmetic.last_turns(found.rows, found.baseline)
    baseline = arithmetic.finished(found.rows)[lambda each: each["method"] == found.baseline]
    lines: list[dict[str, str]] = []
    for category in [*found.categories, None]:
        own = baseline if category is None else baseline[baseline["category"] == category]
        size = {"n": str(len(own)), "tokens": f"{int(own['tokens'].sum()):,}"}
        name = "all" if category is None else words.heading(category)
        cells = {_head(found, method): _speedup(found, method, category) for method in shown}
        lines.append({"job": escaped(name), **cells, **size})
        if any((category, method) in first_tokens for method in shown):
            ratios = {
                _head(found, method): f"{ratio:.2f}" if (ratio := first_tokens.get((category, method))) else NONE
                for method in shown
            }
            lines.append({"job": escaped(f"{name}: time to first token, last turn"), **ratios, **size})
    return Table(found.run, pd.DataFrame(lines), _caption(found, clock))


def _head(found: Comparison, method: str) -> str:
    """The label of a method; one that was measured cold too is the warm one."""
    return found.labels[method] + ", warm" * (f"{COLD}{method}" in found.labels)


def _speedup(found: Comparison, method: str, category: str | None) -> str:
    pairs = found.pairs_of(method)
    pairs = pairs if category is None else pairs[pairs["category"] == category]
    if pairs.empty:
        return NONE
    ratio = float(arithmetic.speedup(pairs[arithmetic.TERMS].sum()))
    if len(pairs) < _FEWEST:
        return f"{ratio:.2f}"
    low, high = arithmetic.interval(pairs)
    return f"{ratio:.2f} ({low:.2f} to {high:.2f})"


def _caption(found: Comparison, clock: str) -> str:
    known = found.rows["environment"].iloc[-1]
    names = "dtype", "cpu", "threads", "torch", "transformers"
    facts = {name: escaped(str(known.get(name, "unknown"))) for name in names}
    facts["model"] = escaped(Path(str(known.get("model", "unknown"))).name)
    limit = found.rows["max_new_tokens"].iloc[-1]
    return (
        f"Speedup over transformers' `generate`, end to end, prefill included, {words.clock_words(clock)}. "
        f"{facts['model']} in {facts['dtype']} on {facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"transformers {facts['transformers']}, {str(known.get('date', ''))[:10]}; batch size 1, greedy, at most "
        f"{limit} new tokens a turn. n: measured requests; tokens: output tokens of `generate`. Parentheses: 95% "
        f"bootstrap CI over requests, given from n = {_FEWEST}. Cold: a new drafter for every request. Warm: the "
        "drafter has learned from all earlier requests, those of the warm-up included. Plain decoding does not draft: "
        "on a CPU its speedup is that of prepacked weights and of the loop."
    )
