"""The findings of a report, losses included, and what a reader must know before believing them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from . import arithmetic, words
from .arithmetic import Row
from .summary import Comparison, Result, Summary, curves

REPETITIVE = 0.5
"""Share of repeated 4-grams above which a report says that the output flatters methods that look back."""
CLOSE = 1e-3
"""Margin of logits up to which a divergence in float32 can be a matter of rounding."""


def findings(summary: Summary) -> list[str]:
    """The report in a few sentences, losses included."""
    found = [sentence for each in summary.main for sentence in _main_findings(each)]
    for (mode, name), points in summary.studies.items():
        found += _study_findings(f"{words.study_words(name).title}, {words.mode_title(mode).lower()}", points)
    checked = sum(result.compared for result in summary.results)
    if checked:
        different = sum(len(result.divergences) for result in summary.results)
        found.append(
            f"All {checked:,} outputs that were compared are identical to plain decoding's."
            if not different
            else f"{different:,} of {checked:,} outputs that were compared differ from plain decoding's."
        )
    failed = sum(len(result.failures) for result in summary.results)
    return [*found, f"{words.count(failed, 'run')} failed."] if failed else found


def _main_findings(found: Comparison) -> list[str]:
    raced = [each for each in found.results if each.speedup is not None and not each.is_baseline]
    if not raced or found.baseline is None:
        return []
    best = max(raced, key=lambda each: each.speedup or 0)
    won = (best.speedup or 0) > 1
    text = f"{words.mode_title(found.mode)}: "
    text += (
        f"{best.label} is fastest" if won else f"nothing is faster than {found.baseline.label}; next is {best.label}"
    )
    text += f", {best.speedup:.2f} times as fast" + (f" as {found.baseline.label}" if won else "")
    if best.mat is not None:
        text += f", with {best.mat:.2f} tokens a step"
    if best.mat_without_loops is not None and f"{best.mat_without_loops:.2f}" != f"{best.mat:.2f}":
        text += f" ({best.mat_without_loops:.2f} outside loops)"
    if best.spread is not None and len(best.pairs) > 1:
        text += f"; the prompts range from {best.spread.least:.2f} to {best.spread.most:.2f}"
    slower = [each.label for each in raced if (each.speedup or 0) < 1]
    return [f"{text}.", *([f"Slower than {found.baseline.label}: {'; '.join(slower)}."] if slower and won else [])]


def _study_findings(place: str, points: Sequence[Comparison]) -> list[str]:
    found = []
    for curve, measured in curves(points).items():
        rates = {point: result.decoding for point, result in measured if result.decoding is not None}
        mats = {point: result.mat for point, result in measured if result.mat is not None}
        if len(rates) > 1 and mats:
            fastest, deepest = max(rates, key=lambda point: rates[point]), max(mats, key=lambda point: mats[point])
            found.append(
                f"{place}: {curve} is fastest at {fastest} ({words.rate(rates[fastest])} tokens/s), "
                f"and most is accepted at {deepest} (MAT {mats[deepest]:.2f})."
            )
    return found


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = [*summary.notes, *_environments_differ(summary), *_settings_differ(summary)]
    for each in summary.comparisons:
        place = _place(each)
        if each.study is None and each.baseline is None:
            found.append(f"{place}: no baseline was measured, so there are no speedups.")
        found += _incomplete(each, place)
    for each in summary.main:
        found += _repetitive(each)
    found += _far_divergences(summary)
    if summary.main and {each.mode for each in summary.main} == {"generate"}:
        found.append("No replay was measured: `--replay` shows what methods gain on text that the model did not write.")
    return found


def _place(found: Comparison) -> str:
    name = words.mode_title(found.mode)
    if found.study is not None:
        name += f", study {found.study}" + (f" at {found.point}" if found.point is not None else "")
    return name + (f" of {found.batch}" if found.mode == "batch" else "")


def _environments_differ(summary: Summary) -> list[str]:
    every = summary.environments
    if len(every) < 2:
        return []
    keys = dict.fromkeys(key for each in every for key in each)
    different = {key: list(dict.fromkeys(str(each.get(key)) for each in every)) for key in keys}
    named = "; ".join(f"{key}: {' or '.join(values)}" for key, values in different.items() if len(values) > 1)
    return [f"Rows come from {len(every)} environments ({named}). Times of different environments do not compare."]


def _settings_differ(summary: Summary) -> list[str]:
    found = []
    for each in summary.comparisons:
        rows = [row for result in each.results for row in result.rows]
        for key in ("temperature", "max_new_tokens", "seed"):
            values = sorted({str(row.get(key)) for row in rows})
            if len(values) > 1:
                found.append(f"{_place(each)}: rows differ in {key} ({', '.join(values)}).")
    return found


def _incomplete(found: Comparison, place: str) -> list[str]:
    counts = {each.label: len(each.rows) + len(each.failures) for each in found.results}
    most = max(counts.values())
    short = [f"{label} ({count})" for label, count in counts.items() if count < most]
    if not short:
        return []
    return [f"{place}: not every method has all {most} prompts yet: {', '.join(short)}. Their figures cover less."]


def _repetitive(found: Comparison) -> list[str]:
    share = max((each.repeated_4grams or 0.0 for each in found.results), default=0.0)
    if found.mode != "generate" or share <= REPETITIVE:
        return []
    return [
        f"Up to {share:.0%} of the 4-grams of the generated text are repetitions. This flatters every method that "
        "looks back: see MAT without loops, and replay."
    ]


def _far_divergences(summary: Summary) -> list[str]:
    far = [
        row
        for result in summary.results
        for row in result.divergences
        if row["environment"].get("dtype") == "float32" and arithmetic.margin(row) > CLOSE
    ]
    if not far:
        return []
    names = ", ".join(dict.fromkeys(row["label"] for row in far))
    return [
        f"{words.count(len(far), 'output')} in float32 {'differs' if len(far) == 1 else 'differ'} from plain "
        f"decoding's by more than rounding explains (margin above {CLOSE:g}): {names}. "
        "This is a mistake of the method: report it."
    ]


class Failure(NamedTuple):
    """Runs that failed alike: their messages differ in numbers only."""

    message: str
    """That of the first."""
    methods: list[str]
    """Labels."""
    prompts: int
    runs: int


def failures(results: Iterable[Result]) -> list[Failure]:
    """What failed, the most frequent first."""
    alike: dict[str, list[Row]] = {}
    for result in results:
        for row in result.failures:
            alike.setdefault(re.sub(r"\d+", "#", row["failure"]), []).append(row)
    found = [
        Failure(
            rows[0]["failure"],
            list(dict.fromkeys(row["label"] for row in rows)),
            len({row["prompt"] for row in rows}),
            len(rows),
        )
        for rows in alike.values()
    ]
    return sorted(found, key=lambda each: -each.runs)
