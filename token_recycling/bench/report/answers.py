"""The answer of a report, for its first screen: which method is fastest, by how much, on what, and how sure that is."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from . import arithmetic, words
from .summary import Comparison, Result, Summary

SURE = 0.95
"""Share of draws of the prompts in which a method must be ahead to be called surely ahead."""


class Answer(NamedTuple):
    """Of one kind of text."""

    place: str
    who: str
    much: str
    on: str
    sure: str


def answers(summary: Summary) -> list[Answer]:
    """One for each comparison of methods that has a baseline."""
    return [found for each in summary.main if (found := _answer(each)) is not None]


def _answer(found: Comparison) -> Answer | None:
    if not found.raced or found.baseline is None:
        return None
    best, against = found.raced[0], found.baseline.label
    times = f"{best.speedup:.2f} times as fast"
    won = best.speedup is not None and best.speedup > 1
    who = best.label if won else f"Nothing is faster than {against}"
    much = f"{times} as {against}" if won else f"next is {best.label}, {times}"
    return Answer(words.mode_title(found.mode), who, much, _on(best), _sure(found.raced))


def _on(best: Result) -> str:
    """What was decoded, and how many tokens a step that took."""
    tokens = sum(row["tokens"] for row, _ in best.pairs)
    text = f"{words.count(len(best.pairs), 'prompt')}, {words.count(tokens, 'token')}"
    if best.mat is not None:
        text += f"; {best.mat:.2f} tokens a step"
    if best.mat_without_loops is not None and f"{best.mat_without_loops:.2f}" != f"{best.mat:.2f}":
        text += f", {best.mat_without_loops:.2f} outside loops"
    return text


def _sure(raced: list[Result]) -> str:
    """What other prompts of the kind might give."""
    best = raced[0]
    between = arithmetic.interval(best.pairs)
    if between is None:
        return "One prompt: how much it varies is not known."
    text = f"With prompts drawn anew: {between[0]:.2f} to {between[1]:.2f} in 95 draws of 100"
    if len(raced) > 1:
        second = raced[1]
        common = {row["prompt"] for row, _ in best.pairs} & {row["prompt"] for row, _ in second.pairs}
        ours, theirs = (
            arithmetic.resampled([pair for pair in each.pairs if pair[0]["prompt"] in common]) for each in raced[:2]
        )
        ahead = float(np.mean(ours > theirs))
        kind = "surely ahead" if ahead >= SURE else "not surely ahead"
        text += f"; {kind} of {second.label} ({second.speedup:.2f}): in {ahead:.0%} of them"
    return f"{text}."
