"""The findings of a report, losses included, and what a reader must know before believing them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pandas as pd

from . import arithmetic, words
from .arithmetic import finished
from .summary import Comparison, Summary, curves

ENOUGH = 20
"""Prompts below which a report does not say whether a method is surely ahead."""
SURE = 0.95
"""Share of draws of the prompts in which a method must be ahead to be called surely ahead."""
CHEAPER = 1.05
"""Times MAT above which a speedup is questioned: steps then cost less than the baseline's."""
REPETITIVE = 0.5
"""Share of repeated 4-grams above which a report says that the output flatters methods that look back."""
CLOSE = 1e-3
"""Margin of logits up to which a divergence in float32 can be a matter of rounding."""


class Answer(NamedTuple):
    """The fastest method on one kind of text, by how much, on what, and how sure that is."""

    place: str
    who: str
    much: str
    on: str
    sure: str

    def __str__(self) -> str:
        return f"{self.place}: {self.who}: {self.much}. {self.on}. {self.sure}"


def answers(summary: Summary) -> list[Answer]:
    """One for each comparison of methods that has a baseline."""
    return [_answer(each) for each in summary.main if each.baseline is not None and len(each.speedups)]


def _answer(found: Comparison) -> Answer:
    best, speedup = found.speedups.index[0], found.speedups.iloc[0]
    against, times = found.labels[str(found.baseline)], f"{speedup:.2f} times as fast"
    won = speedup > 1
    who = found.labels[best] if won else f"Nothing is faster than {against}"
    much = f"{times} as {against}" if won else f"next is {found.labels[best]}, {times}"
    pairs = found.pairs_of(best)
    mat, outside = (f"{figure:.2f}" for figure in found.figures.loc[best, ["mat", "mat_without_loops"]])
    on = f"{words.count(len(pairs), 'prompt')}, {words.count(int(pairs['tokens'].sum()), 'token')}"
    on += f"; {mat} tokens a step" * (mat != "nan") + f", {outside} outside loops" * (outside not in ("nan", mat))
    return Answer(words.mode_title(found.mode), who, much, on, _sure(found))


def _sure(found: Comparison) -> str:
    """What other prompts of the kind might give."""
    best = found.pairs_of(found.speedups.index[0])
    between = arithmetic.interval(best)
    if between is None:
        return "One prompt: how much it varies is not known."
    text = f"With prompts drawn anew: {between[0]:.2f} to {between[1]:.2f} in 95 draws of 100"
    if len(found.speedups) > 1:
        second = found.speedups.index[1]
        rival = found.pairs_of(second)
        best, rival = best[best["prompt"].isin(rival["prompt"])], rival[rival["prompt"].isin(best["prompt"])]
        name = f"{found.labels[second]} ({found.speedups.iloc[1]:.2f})"
        if len(best) < ENOUGH:
            return f"{text}; {words.count(len(best), 'prompt')} cannot say whether it is ahead of {name}."
        ahead = (arithmetic.resampled(best) > arithmetic.resampled(rival)).mean()
        return f"{text}; {'surely' if ahead >= SURE else 'not surely'} ahead of {name}: in {ahead:.0%} of them."
    if len(best) < ENOUGH:
        text += f"; {words.count(len(best), 'prompt')} cannot say how much it varies"
    return f"{text}."


def findings(summary: Summary) -> list[str]:
    """The report in a few sentences, losses included."""
    return [*map(str, answers(summary)), *others(summary)]


def others(summary: Summary) -> list[str]:
    """The findings after the answers."""
    return [*_slower(summary), *_best_points(summary), *_outputs(summary)]


def _slower(summary: Summary) -> Iterator[str]:
    for each in summary.main:
        slower = "; ".join(each.labels[method] for method in each.labels if each.speedups.get(method, 1.0) < 1)
        if slower and each.speedups.max() > 1:
            yield f"{words.mode_title(each.mode)}, slower than {each.labels[str(each.baseline)]}: {slower}."


def _best_points(summary: Summary) -> Iterator[str]:
    """Where the studies have their best points."""
    for (mode, name), points in summary.studies.items():
        place = f"{words.study_words(name).title}, {words.mode_title(mode).lower()}"
        for curve, known in curves(points).items():
            known = known.dropna(subset=["decoding", "mat"]).set_index("point")
            if len(known) > 1:
                point, rate = known["decoding"].idxmax(), known["decoding"].max()
                yield (
                    f"{place}: {curve} is fastest at {point} ({rate:{',.0f' if rate >= 100 else '.1f'}} tokens/s), "
                    f"and most is accepted at {known['mat'].idxmax()} (MAT {known['mat'].max():.2f})."
                )


def _outputs(summary: Summary) -> Iterator[str]:
    """Whether outputs are plain decoding's, and how many runs failed."""
    identical = summary.rows["identical"].dropna()
    different = int(identical.eq(False).sum())
    if different:
        yield f"{different:,} of {len(identical):,} outputs that were compared differ from plain decoding's."
    elif len(identical):
        yield f"All {len(identical):,} outputs that were compared are identical to plain decoding's."
    if failed := len(summary.rows) - len(finished(summary.rows)):
        yield f"{words.count(failed, 'run')} failed."


def warnings(summary: Summary) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = [*summary.notes, *_environments(summary)]
    for each in summary.comparisons:
        found += _conditions(each)
    for each in summary.main:
        found += _questions(each)
    found += _far_divergences(summary)
    if summary.main and {each.mode for each in summary.main} == {"generate"}:
        found.append(
            "No replay was measured: with `--replay` and answers that are known, it shows what methods gain on text "
            "that the model did not write."
        )
    return found


def _environments(summary: Summary) -> Iterator[str]:
    every = pd.DataFrame(summary.environments, dtype=object).astype(str)
    named = "; ".join(f"{key}: {' or '.join(every[key].unique())}" for key in every if every[key].nunique() > 1)
    if len(every) > 1:
        yield f"Rows come from {len(every)} environments ({named}). Times of different environments do not compare."


def _conditions(found: Comparison) -> Iterator[str]:
    """What differs between the rows of a comparison, and what is missing."""
    place = words.mode_title(found.mode)
    place += f", study {found.study}" if found.study is not None else ""
    place += f" at {found.point}" if found.point is not None else ""
    place += f" of {found.batch}" if found.mode == "batch" else ""
    for key in ("temperature", "max_new_tokens", "seed"):
        if len(values := sorted(found.rows[key].astype(str).unique())) > 1:
            yield f"{place}: rows differ in {key} ({', '.join(values)})."
    if found.study is None and found.baseline is None:
        yield f"{place}: no baseline was measured, so there are no speedups."
    counts = found.rows["method"].value_counts()
    every = counts.max()
    if short := [f"{label} ({counts[method]})" for method, label in found.labels.items() if counts[method] < every]:
        yield f"{place}: not every method has all {every} prompts yet: {', '.join(short)}. Their figures cover less."


def _questions(found: Comparison) -> Iterator[str]:
    """Figures that do not mean what they seem to."""
    odd = [
        f"{found.labels[method]} ({speedup:.2f} times as fast, {found.figures['mat'][method]:.2f} tokens a step)"
        for method, speedup in found.speedups.items()
        if speedup > CHEAPER * max(1.0, found.figures["mat"][method])
    ]
    if odd:
        yield (
            f"{words.mode_title(found.mode)}: time and tokens a step disagree: {'; '.join(odd)}. Steps that cost less "
            "than the baseline's, or other work on the machine, are no gain of drafting: see `--baseline plain` and "
            "`--clock processor`."
        )
    if found.mode == "generate" and (share := found.figures["repeated_4grams"].max()) > REPETITIVE:
        yield (
            f"Up to {share:.0%} of the 4-grams of the generated text are repetitions. This flatters every method that "
            "looks back: see MAT without loops, and replay."
        )


def _far_divergences(summary: Summary) -> Iterator[str]:
    far = summary.rows[summary.rows["margin"] > CLOSE]
    exact = far["environment"].map(lambda known: known.get("dtype") == "float32").astype(bool)
    far = far[exact].sort_values("margin")
    if len(far):
        yield (
            f"{words.count(len(far), 'output')} in float32 {'differs' if len(far) == 1 else 'differ'} from plain "
            f"decoding's by more than rounding explains (margin above {CLOSE:g}): {', '.join(far['label'].unique())}; "
            f"most on {far['prompt'].iloc[-1]}. This is a mistake of the method: report it."
        )
