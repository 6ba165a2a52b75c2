"""The findings of a report, losses included, and what a reader must know before believing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from . import arithmetic, words
from .summary import Comparison, Summary, curves

REPETITIVE = 0.5
"""Share of repeated 4-grams above which a report says that the output flatters methods that look back."""
CLOSE = 1e-3
"""Margin of logits up to which a divergence in float32 can be a matter of rounding."""


def findings(summary: Summary) -> list[str]:
    """The report in a few sentences, losses included."""
    main = [sentence for each in summary.main for sentence in _main_findings(each)]
    modes = dict.fromkeys(mode for mode, _ in summary.studies)
    return [*main, *(sentence for mode in modes for sentence in of_studies(summary, mode)), *of_outputs(summary)]


def of_studies(summary: Summary, mode: str) -> list[str]:
    """Where the studies of a mode have their best points."""
    return [
        sentence
        for (of_mode, name), points in summary.studies.items()
        if of_mode == mode
        for sentence in _study_findings(f"{words.study_words(name).title}, {words.mode_title(mode).lower()}", points)
    ]


def of_outputs(summary: Summary) -> list[str]:
    """Whether outputs are plain decoding's, and how many runs failed."""
    found = []
    checked = sum(result.compared for result in summary.results)
    different = sum(len(result.divergences) for result in summary.results)
    if different:
        found.append(f"{different:,} of {checked:,} outputs that were compared differ from plain decoding's.")
    elif checked:
        found.append(f"All {checked:,} outputs that were compared are identical to plain decoding's.")
    if failed := sum(len(result.failures) for result in summary.results):
        found.append(f"{words.count(failed, 'run')} failed.")
    return found


def _main_findings(found: Comparison) -> Iterator[str]:
    speeds = {each.label: each.speedup or 0.0 for each in found.raced}
    if not speeds or found.baseline is None:
        return
    best = found.raced[0]
    speedup = speeds[best.label]
    against, won = found.baseline.label, speedup > 1
    lead = f"{best.label} is fastest" if won else f"nothing is faster than {against}; next is {best.label}"
    text = f"{words.mode_title(found.mode)}: {lead}, {speedup:.2f} times as fast"
    if won:
        text += f" as {against}"
    if best.mat is not None:
        text += f", with {best.mat:.2f} tokens a step"
    if best.mat_without_loops is not None and f"{best.mat_without_loops:.2f}" != f"{best.mat:.2f}":
        text += f" ({best.mat_without_loops:.2f} outside loops)"
    if best.spread is not None and len(best.pairs) > 1:
        text += f"; the prompts range from {best.spread.least:.2f} to {best.spread.most:.2f}"
    yield f"{text}."
    slower = "; ".join(label for label in (each.label for each in found.results) if speeds.get(label, 1.0) < 1)
    if slower and won:
        yield f"Slower than {against}: {slower}."


def _study_findings(place: str, points: Sequence[Comparison]) -> Iterator[str]:
    for curve, measured in curves(points).items():
        rates = {point: result.decoding for point, result in measured if result.decoding is not None}
        mats = {point: result.mat for point, result in measured if result.mat is not None}
        if len(rates) > 1 and mats:
            fastest, deepest = max(rates, key=lambda point: rates[point]), max(mats, key=lambda point: mats[point])
            yield (
                f"{place}: {curve} is fastest at {fastest} ({words.rate(rates[fastest])} tokens/s), "
                f"and most is accepted at {deepest} (MAT {mats[deepest]:.2f})."
            )


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = [*summary.notes, *_environments_differ(summary), *_settings_differ(summary)]
    for each in summary.comparisons:
        if each.study is None and each.baseline is None:
            found.append(f"{_place(each)}: no baseline was measured, so there are no speedups.")
        found += _incomplete(each)
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


def _environments_differ(summary: Summary) -> Iterator[str]:
    every = summary.environments
    keys = dict.fromkeys(key for each in every for key in each)
    values = {key: list(dict.fromkeys(str(each.get(key)) for each in every)) for key in keys}
    named = "; ".join(f"{key}: {' or '.join(found)}" for key, found in values.items() if len(found) > 1)
    if len(every) > 1:
        yield f"Rows come from {len(every)} environments ({named}). Times of different environments do not compare."


def _settings_differ(summary: Summary) -> Iterator[str]:
    for each in summary.comparisons:
        rows = [row for result in each.results for row in result.rows]
        for key in ("temperature", "max_new_tokens", "seed"):
            values = sorted({str(row.get(key)) for row in rows})
            if len(values) > 1:
                yield f"{_place(each)}: rows differ in {key} ({', '.join(values)})."


def _incomplete(found: Comparison) -> Iterator[str]:
    counts = {each.label: len(each.rows) + len(each.failures) for each in found.results}
    most = max(counts.values())
    short = ", ".join(f"{label} ({count})" for label, count in counts.items() if count < most)
    if short:
        yield f"{_place(found)}: not every method has all {most} prompts yet: {short}. Their figures cover less."


def _repetitive(found: Comparison) -> Iterator[str]:
    share = max((each.repeated_4grams or 0.0 for each in found.results), default=0.0)
    if found.mode == "generate" and share > REPETITIVE:
        yield (
            f"Up to {share:.0%} of the 4-grams of the generated text are repetitions. This flatters every method that "
            "looks back: see MAT without loops, and replay."
        )


def _far_divergences(summary: Summary) -> Iterator[str]:
    every = [row for result in summary.results for row in result.divergences]
    far = [row for row in every if row["environment"].get("dtype") == "float32" and arithmetic.margin(row) > CLOSE]
    if far:
        names = ", ".join(dict.fromkeys(row["label"] for row in far))
        yield (
            f"{words.count(len(far), 'output')} in float32 {'differs' if len(far) == 1 else 'differ'} from plain "
            f"decoding's by more than rounding explains (margin above {CLOSE:g}): {names}. "
            "This is a mistake of the method: report it."
        )
