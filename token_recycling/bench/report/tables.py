"""The tables of a report. The first is in the form of the paper's table 1: a line a method, a column a category."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from operator import attrgetter

from . import arithmetic, words
from .summary import Comparison, Result, Summary
from .table import NONE, Cell, Table

_two, _three = "{:.2f}".format, "{:.3f}".format
_Column = tuple[str, Callable[[Result], float | None], Callable[[float], str]]
"""A column's head, its figure, and the figure's form."""


def overview_table(summary: Summary) -> Table | None:
    """Every method, the fastest first: speedup and MAT on each kind of text."""
    compared = [each for each in summary.main if each.baseline is not None]
    if not compared:
        return None
    by_mode = [{result.method: result for result in each.results} for each in compared]
    speeds = {method: [getattr(known.get(method), "speedup", None) for known in by_mode] for method in summary.methods}
    shown = sorted((method for method in speeds if any(speeds[method])), key=lambda method: -(speeds[method][0] or 0.0))
    best = [max((result.speedup or 0.0 for result in each.raced), default=0.0) for each in compared]
    rows = []
    for method in shown:
        cells = [Cell(summary.methods[method])]
        for place, known in enumerate(by_mode):
            result, speed = known.get(method), speeds[method][place]
            between = arithmetic.interval(result.pairs) if result is not None and not result.is_baseline else None
            cells += [
                Cell(_text(speed, _two), best=speed is not None and speed == best[place]),
                Cell(NONE if between is None else f"{between[0]:.2f} to {between[1]:.2f}"),
                Cell(_text(None if result is None else result.mat, _two)),
            ]
        rows.append(cells)
    heads = [head for each in compared for head in (words.mode_title(each.mode).lower(), "middle 95%", "MAT")]
    against = " and ".join(dict.fromkeys(each.baseline.label for each in compared if each.baseline is not None))
    note = (
        f"Times as fast as {against}, whole calls; the middle 95% of that over prompts drawn anew; and MAT, tokens a "
        "step. Bold: the fastest."
    )
    if any(result.hindsight for each in compared for result in each.results):
        note += " An oracle knows what will be accepted: it is a bound."
    return Table("All methods", ["method", *heads], rows, note, spare=frozenset(range(2, len(heads) + 1, 3)))


def speedup_table(found: Comparison) -> Table:
    """Speedup by category and over all, MAT, and tokens/s, as in the paper's table 1."""
    several = found.categories if len(found.categories) > 1 else []
    columns: list[_Column] = [(words.heading(name), _of_category(name, "speedup"), _two) for name in several]
    columns += [("speedup", attrgetter("speedup"), _two), ("MAT", attrgetter("mat"), _two)]
    columns.append(("tokens/s", attrgetter("decoding"), words.rate))
    against = f"over {found.baseline.label}" if found.baseline else "not known: no baseline was measured"
    note = f"Speedup {against}, whole calls; the best of a column in bold. Tokens/s of decoding."
    return _figures("Speedup", found.results, columns, note)


def output_table(found: Comparison) -> Table:
    """What stands behind the speedup: loops, spread, whole calls, identity, failures."""
    columns = ["MAT without loops", "repeated", "whole call", "speedup quartiles", "identical", "largest margin"]
    columns.append("failed")
    return Table(
        "Behind the speedup",
        ["method", *columns],
        [[Cell(each.label), *(_COLUMNS[column](each) for column in columns)] for each in found.results],
        "Repeated: 4-grams that stood in the same output before. Whole call: tokens/s, the prompt included. "
        "Quartiles: lower, median and upper, of the speedups prompt by prompt. Identical: to plain decoding; margin: "
        "of the logits where an output first differs.",
    )


def category_table(found: Comparison, title: str, figure: str, note: str = "") -> Table:
    """One figure of every method by category; `figure` is an attribute of `Result`."""
    form = _two if figure.startswith("mat") else words.rate
    columns = [(words.heading(name), _of_category(name, figure), form) for name in found.categories]
    return _figures(title, found.results, [*columns, ("all", attrgetter(figure), form)], note)


def parts_table(results: Sequence[Result], labels: Sequence[str] | None = None) -> Table | None:
    """Milliseconds of each part of a step."""
    labels = labels or [each.label for each in results]
    timed = [(label, each.parts) for label, each in zip(labels, results, strict=True) if each.parts]
    if not timed:
        return None
    names = list(dict.fromkeys(part for _, parts in timed for part in parts))
    rows = []
    for label, parts in timed:
        seconds = [*(parts.get(part) for part in names), sum(parts.values())]
        overhead = _text(arithmetic.overhead(parts), _percent)
        rows.append([Cell(label), *(Cell(_text(each, _milliseconds)) for each in seconds), Cell(overhead)])
    return Table(
        "Time per part of a step",
        ["method", *names, "step", "overhead"],
        rows,
        "Milliseconds a step. Overhead: time outside the model's forward pass, as a share of the forward pass.",
    )


def points_table(points: Sequence[Comparison], title: str, axis: str) -> Table:
    """A line for each method at each point of a study, or at each size of a batch."""
    columns = ["drafted", "MAT", "MAT without loops", "tokens/s", "whole call", "speedup", "identical", "failed"]
    note = "Drafted: mean nodes of a step, the root left out. Tokens/s of decoding, and of the whole call."
    known = any(not result.is_baseline and result.speedup is not None for each in points for result in each.results)
    table = _by_point(points, title, axis, columns, note)
    # Columns after the names in which no row says anything are left out.
    unused = {NONE, "0"} if known else {NONE, "0", "1.00"}
    texts = [{row[place].text for row in table.rows} for place in range(len(table.columns))]
    kept = [place < 2 or not found <= unused for place, found in enumerate(texts)]
    rows = [list(compress(row, kept)) for row in table.rows]
    return replace(table, columns=list(compress(table.columns, kept)), rows=rows)


def rates_table(points: Sequence[Comparison], title: str, axis: str) -> Table:
    """A line for each method at each point of a study of when to stop drafting (SpecDec++, figure 4)."""
    columns = ["drafted", "discard rate", "verification rate", "MAT", "tokens/s", "speedup", "identical", "failed"]
    note = (
        "Drafted: mean tokens of a step. Discard rate: drafted tokens that were not accepted, an emitted token. "
        "Verification rate: forward passes of the target, an emitted token. Less is better for both."
    )
    return _by_point(points, title, axis, columns, note)


def _by_point(points: Sequence[Comparison], title: str, axis: str, columns: list[str], note: str) -> Table:
    rows = []
    for each in points:
        point = str(each.batch) if each.mode == "batch" else each.point or NONE
        for result in each.results:
            rows.append([Cell(point), Cell(result.label), *(_COLUMNS[column](result) for column in columns)])
    return Table(title, [axis, "method", *columns], rows, note, frozenset({1}))


def divergence_table(summary: Summary, most: int = 20) -> Table | None:
    """Outputs that differ from plain decoding's, the largest margins first."""
    every = [row for result in summary.results for row in result.divergences]
    every.sort(key=lambda row: -arithmetic.margin(row))
    if not every:
        return None
    rows = []
    for row in every[:most]:
        conditions = (row["mode"], row["study"], row["point"], row["batch"] if row["mode"] == "batch" else None)
        run = " ".join(str(each) for each in conditions if each is not None)
        found = [(row["divergence"] or {}).get(key, NONE) for key in ("turn", "place", "expected", "got")]
        values = [row["label"], run, row["prompt"], *found, _logits(arithmetic.margin(row))]
        rows.append([Cell(str(value)) for value in values])
    more = f" {len(every) - most} more are in rows.jsonl." if len(every) > most else ""
    return Table(
        "Outputs that differ",
        ["method", "run", "prompt", "turn", "place", "expected", "got", "margin"],
        rows,
        f"Where an output first differs from plain decoding's: token ids, and the difference of their logits.{more}",
        frozenset({0, 1, 2}),
    )


def failure_table(summary: Summary) -> Table | None:
    """Failures by message, the most frequent first."""
    every = [row for result in summary.results for row in result.failures]
    if not every:
        return None
    alike = arithmetic.grouped(every, lambda row: re.sub(r"\d+", "#", row["failure"]))
    rows = []
    for failed in sorted(alike.values(), key=len, reverse=True):
        methods = ", ".join(dict.fromkeys(row["label"] for row in failed))
        prompts = len({row["prompt"] for row in failed})
        rows.append([Cell(failed[0]["failure"]), Cell(methods), Cell(str(prompts)), Cell(str(len(failed)))])
    columns = ["failure", "methods", "prompts", "runs"]
    return Table("Failures", columns, rows, "Failures alike but for numbers stand in one line.", frozenset({0, 1}))


def _figures(title: str, results: Sequence[Result], columns: Sequence[_Column], note: str) -> Table:
    """A line for each method; the best figure of a column is marked where there is a choice."""
    rows = [[Cell(each.label)] for each in results]
    for _, figure, form in columns:
        values = [figure(each) for each in results]
        best = max((value for value in values if value is not None), default=None)
        for row, value in zip(rows, values, strict=True):
            row.append(Cell(_text(value, form), best=len(results) > 1 and value is not None and value == best))
    return Table(title, ["method", *(head for head, _, _ in columns)], rows, note)


def _of_category(category: str, figure: str) -> Callable[[Result], float | None]:
    return lambda result: getattr(result.of(category), figure)


def _text(value: float | None, form: Callable[[float], str]) -> str:
    return NONE if value is None else form(value)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3f}" if seconds < 0.01 else f"{1000 * seconds:.1f}"


def _logits(value: float) -> str:
    return "unknown" if value == float("inf") else f"{value:.2g}"


def _quartiles(result: Result) -> str:
    found = result.spread
    if found is None or result.is_baseline:
        return NONE
    return f"{found.lower:.2f} {found.median:.2f} {found.upper:.2f}"


def _identical(result: Result) -> Cell:
    if not result.compared:
        return Cell(NONE)
    same = result.compared - len(result.divergences)
    return Cell(f"{same} of {result.compared}", alarm=same < result.compared)


_COLUMNS: dict[str, Callable[[Result], Cell]] = {
    "drafted": lambda result: Cell(NONE if result.nodes is None else f"{result.nodes - 1:.1f}"),
    "MAT": lambda result: Cell(_text(result.mat, _two)),
    "MAT without loops": lambda result: Cell(_text(result.mat_without_loops, _two)),
    "discard rate": lambda result: Cell(_text(result.discard_rate, _three)),
    "verification rate": lambda result: Cell(_text(result.verification_rate, _three)),
    "repeated": lambda result: Cell(_text(result.repeated_4grams, _percent)),
    "tokens/s": lambda result: Cell(_text(result.decoding, words.rate)),
    "whole call": lambda result: Cell(_text(result.whole_call, words.rate)),
    "speedup": lambda result: Cell(_text(result.speedup, _two)),
    "speedup quartiles": lambda result: Cell(_quartiles(result)),
    "identical": _identical,
    "largest margin": lambda result: Cell(
        _logits(arithmetic.margin(result.divergences[0])) if result.divergences else NONE
    ),
    "failed": lambda result: Cell(str(len(result.failures)), alarm=bool(result.failures)),
}
"""What stands under a head."""
