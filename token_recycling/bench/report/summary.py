"""What a report shows: methods that were measured under the same conditions, and what their speedups refer to."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from ..row_format import BASELINES, HINDSIGHT
from . import arithmetic
from .arithmetic import FIGURES

CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "mbpp")
"""Columns in the order of the Token Recycling paper's table 1; others follow as they appear."""


def ordered(names: Collection[str], first: Sequence[str]) -> list[str]:
    """Names without repetitions in their order, but those in `first` before the others."""
    return [*(name for name in first if name in names), *(n for n in dict.fromkeys(names) if n not in first)]


@dataclass
class Comparison:
    """Methods that were measured under the same conditions."""

    mode: str
    study: str | None
    point: str | None
    batch: int
    rows: pd.DataFrame
    """Of `arithmetic.frame`."""
    pairs: pd.DataFrame
    """The rows that have a speedup."""
    labels: dict[str, str]
    """By method, in the order in which they are shown: the baseline first."""
    baseline: str | None
    """The method that speedups refer to, if it was measured under these conditions."""

    @cached_property
    def figures(self) -> pd.DataFrame:
        """`FIGURES` by method, and its `label`."""
        found = arithmetic.figures(self.rows, self.pairs, ["method"]).loc[list(self.labels)]
        return found.assign(label=list(self.labels.values()))

    @cached_property
    def by_category(self) -> pd.DataFrame:
        """`FIGURES` by category and method."""
        return arithmetic.figures(self.rows, self.pairs, ["category", "method"])

    @cached_property
    def categories(self) -> list[str]:
        return ordered(self.rows["category"].tolist(), CATEGORIES)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Seconds a step, by method and part."""
        found = arithmetic.parts(self.rows)
        return found.loc[[method for method in self.labels if method in found.index]]

    @cached_property
    def speedups(self) -> pd.Series:
        """Of the methods that can be called fast or slow, the fastest first: no baseline, and none that knows what will
        be accepted.
        """
        found = self.figures["speedup"].dropna()
        raced = [each != self.baseline and each.partition(":")[0] != HINDSIGHT for each in found.index]
        return found[raced].sort_values(ascending=False, kind="stable")

    def pairs_of(self, method: str) -> pd.DataFrame:
        """The rows of a method that have a speedup."""
        return self.pairs[self.pairs["method"] == method]

    def as_dict(self) -> dict[str, Any]:
        """Every figure as a plain value, for JSON."""
        shares = arithmetic.lengths(self.rows)
        results = [
            {
                "method": method,
                "label": label,
                "baseline": method == self.baseline,
                **_plain(self.figures.loc[method, FIGURES]),
                "categories": {
                    name: _plain(self.by_category.loc[name, method])
                    for name in self.categories
                    if (name, method) in self.by_category.index
                },
                "seconds_per_step": _plain(self.parts.loc[method]) if method in self.parts.index else {},
                "steps_by_length": _plain(shares.loc[method]) if method in shares.index else {},
            }
            for method, label in self.labels.items()
        ]
        conditions = {"mode": self.mode, "study": self.study, "point": self.point, "batch": self.batch}
        return {**conditions, "baseline": self.baseline, "results": results}


def _plain(values: pd.Series) -> dict[str, float | None]:
    """Figures for JSON, which knows neither NaN nor infinity."""
    return {str(name): float(value) if abs(value) < float("inf") else None for name, value in values.items()}


@dataclass
class Summary:
    """All that a report shows."""

    rows: pd.DataFrame
    comparisons: list[Comparison]
    clock: str = "wall"
    """What times were measured with, of `CLOCKS`."""
    notes: list[str] = field(default_factory=list)
    """What went wrong in reading."""

    @cached_property
    def methods(self) -> dict[str, str]:
        """Labels by method, in the order in which they are shown everywhere; the baselines first."""
        labels = self.rows.groupby("method", sort=False)["label"].first()
        return {method: labels[method] for method in ordered(labels.index.tolist(), BASELINES)}

    @cached_property
    def main(self) -> list[Comparison]:
        """The comparisons that belong to no study, one prompt at a time."""
        return [each for each in self.comparisons if each.study is None and each.mode != "batch"]

    @cached_property
    def batches(self) -> list[Comparison]:
        """Several prompts in one call, by their number."""
        return [each for each in self.comparisons if each.mode == "batch"]

    @cached_property
    def studies(self) -> dict[tuple[str, str], list[Comparison]]:
        """By mode and study, the points in the order of the rows."""
        found: dict[tuple[str, str], list[Comparison]] = {}
        for each in self.comparisons:
            if each.study is not None and each.mode != "batch":
                found.setdefault((each.mode, each.study), []).append(each)
        return found

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        """Different ones, the date left out."""
        found = [{key: value for key, value in known.items() if key != "date"} for known in self.rows["environment"]]
        return list({json.dumps(known, sort_keys=True): known for known in found}.values())


def curves(points: Sequence[Comparison]) -> dict[str, pd.DataFrame]:
    """Figures of what belongs together in a study, a line for each point: of a method that stands at several points, or
    of methods of one drafter that differ from point to point. Columns `point` and `method` are added.
    """
    measured = [
        each.figures.drop(index=each.baseline or []).assign(point=each.point).reset_index()
        for each in points
        if each.point is not None
    ]
    if not measured:
        return {}
    found = pd.concat(measured)
    found = found[found["prompts"] > 0]
    places = found["method"].value_counts()
    names = [
        label if places[method] > 1 else method.partition(":")[0]
        for method, label in zip(found["method"], found["label"], strict=True)
    ]
    return dict(iter(found.groupby(names, sort=False)))
