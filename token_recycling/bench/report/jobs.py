"""Speedup by job, in one table for all runs: the README's table, and `jobs.md` of a folder with several runs.

A line is a category of prompts, a column a method of a run. A second line of conversations has the time to the first
token of the last turn, which a prefix cache shortens; the last lines have all jobs, and plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from ..row_format import REPLAY_BASELINE
from ..scenario import COLD
from . import arithmetic, words
from .findings import FAR, with_interval
from .summary import Comparison, Summary
from .tables import NONE, Table, escaped

DIFFERS = "differs"
"""Instead of the speedup of other outputs than the baseline's, as where a method breaks the grammar."""
_FEWEST = 3
"""Prompts below which no confidence interval is given."""


class _Column(NamedTuple):
    found: Comparison
    method: str
    head: str


def page(summary: Summary) -> str | None:
    """Return the table as a Markdown page; None where nothing was generated on several jobs in several runs."""
    found = [each for each in summary.main if each.mode == "generate" and each.baseline and len(each.categories) > 1]
    if len(found) < 2:
        return None
    return f"# Speedup by job\n\n{job_table(found, summary.clock).markdown()}\n"


def job_table(found: Sequence[Comparison], clock: str = "wall") -> Table:
    """Return the end-to-end speedup of every method of each run over its baseline, by category."""
    columns = [_Column(each, method, head) for each in found for method, head in _heads(each).items()]
    last_turns = {each.run: arithmetic.last_turns(each.rows, str(each.baseline)) for each in found}
    lines = []
    for category in found[0].categories:
        name = escaped(words.heading(category))
        lines.append([name, *(_cell(column, category) for column in columns)])
        ratios = [last_turns[one.found.run].get((category, one.method)) for one in columns]
        if any(ratio is not None for ratio in ratios):
            cells = [NONE if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            lines.append([f"{name}: time to first token, last turn", *cells])
    lines.append(["all, with 95% CI", *(_overall(one) for one in columns)])
    if any(REPLAY_BASELINE in each.labels for each in found):
        lines.append(["all, plain decoding without drafts", *_plain(columns)])
    frame = pd.DataFrame(lines, columns=["job", *(one.head for one in columns)])
    return Table("Speedup by job", frame, _caption(found[0], clock))


def _heads(found: Comparison) -> dict[str, str]:
    """The head of each method's column; a method that was also measured cold is the warm one."""
    heads = {}
    for method in found.labels:
        if method not in (found.baseline, REPLAY_BASELINE):
            warm = ", warm" * (f"{COLD}{method}" in found.labels)
            label = found.labels[method].removeprefix("transformers ")
            heads[method] = f"{found.run}: {label}{warm}"
    return heads


def _cell(column: _Column, category: str) -> str:
    if category in _wrong(column):
        return DIFFERS
    pairs = column.found.pairs_of(column.method)
    pairs = pairs[pairs["category"] == category]
    return NONE if pairs.empty else f"{arithmetic.speedup(pairs[arithmetic.TERMS].sum()):.2f}"


def _wrong(column: _Column) -> set[str]:
    """The categories in which a method gave an output that rounding does not explain."""
    rows = column.found.rows
    return set(rows[(rows["method"] == column.method) & (rows["margin"] > FAR)]["category"])


def _overall(column: _Column) -> str:
    """Speedup over all prompts, with its confidence interval; none where some outputs are wrong."""
    pairs = column.found.pairs_of(column.method)
    if pairs.empty or _wrong(column):
        return NONE
    ratio = float(arithmetic.speedup(pairs[arithmetic.TERMS].sum()))
    return f"{ratio:.2f}" if len(pairs) < _FEWEST else with_interval(ratio, arithmetic.interval(pairs))


def _plain(columns: Sequence[_Column]) -> list[str]:
    """Speedup of plain decoding in the first column of each run; the others are empty."""
    before = [None, *(one.found for one in columns)]
    return [
        "" if one.found is previous else _overall(one._replace(method=REPLAY_BASELINE))
        for one, previous in zip(columns, before, strict=False)
    ]


def _caption(found: Comparison, clock: str) -> str:
    known = found.rows["environment"].iloc[-1]
    facts = {name: escaped(str(known.get(name, "unknown"))) for name in ("cpu", "torch", "transformers")}
    model = escaped(Path(str(known.get("model", "unknown"))).name)
    threads = words.count(int(known.get("threads", 1)), "thread")
    limit, prompts = found.rows["max_new_tokens"].iloc[-1], len(found.rows["prompt"].unique())
    return (
        f"Speedup over transformers' `generate`, end to end, prefill included, {words.clock_words(clock)}. {model} on "
        f"{facts['cpu']}, {threads}, torch {facts['torch']}, transformers {facts['transformers']}, "
        f"{str(known.get('date', ''))[:10]}; {prompts} prompts, batch size 1, greedy, at most {limit} new tokens per "
        "turn. Cold: a new drafter for every prompt. Warm: the drafter has learned from all earlier prompts, those of "
        f"the warm-up included. {DIFFERS.capitalize()}: another output than the baseline's, by more than rounding "
        "explains. Plain decoding does not draft: its speedup is that of prepacked weights and of the loop."
    )
