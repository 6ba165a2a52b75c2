"""What a report shows: methods that were measured under the same conditions, and against what.

Nothing here knows a method by name except the two baselines: transformers' own `generate` and, where that was not
measured, plain decoding in this project's loop.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

from ..row_format import BASELINE, HINDSIGHT, REPLAY_BASELINE
from . import arithmetic
from .arithmetic import CALL, DECODE, Pair, Row, Spread

BASELINES = (BASELINE, REPLAY_BASELINE)
"""What speedups refer to: the first of these that was measured under the same conditions."""
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "mbpp")
"""Columns in the order of the paper's table 1; others follow as they appear."""
_Figure = TypeVar("_Figure")


def _ordered(names: Collection[str], first: Sequence[str]) -> list[str]:
    """Names in their order, but those in `first` before the others."""
    return [*(name for name in first if name in names), *(name for name in names if name not in first)]


def _of_rows(figure: Callable[[list[Row]], _Figure]) -> cached_property[_Figure]:
    """A figure of all rows of a result, computed once."""
    return cached_property(lambda result: figure(result.rows))


@dataclass
class Result:
    """One method under one set of conditions; every figure is None where the rows do not give it."""

    method: str
    label: str
    rows: list[Row]
    """Rows of runs that finished."""
    failures: list[Row] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    """Prompts that the baseline finished too."""
    is_baseline: bool = False

    def of(self, category: str) -> Result:
        """The same method on the prompts of one category."""
        rows, failures = ([row for row in rows if row["category"] == category] for rows in (self.rows, self.failures))
        pairs = [pair for pair in self.pairs if pair[0]["category"] == category]
        return replace(self, rows=rows, failures=failures, pairs=pairs)

    mat = _of_rows(arithmetic.mat)
    mat_without_loops = _of_rows(arithmetic.mat_without_loops)
    discard_rate = _of_rows(arithmetic.discard_rate)
    verification_rate = _of_rows(arithmetic.verification_rate)
    repeated_4grams = _of_rows(arithmetic.repeated_4grams)
    decoding = _of_rows(lambda rows: arithmetic.tokens_per_second(rows, DECODE))
    """Tokens per second, the prompt's time left out."""
    whole_call = _of_rows(lambda rows: arithmetic.tokens_per_second(rows, CALL))
    """Tokens per second, the prompt's time included."""
    parts = _of_rows(arithmetic.part_seconds)
    """Seconds per step of each part of a step."""
    lengths = _of_rows(arithmetic.lengths)
    nodes = _of_rows(arithmetic.mean_nodes)
    by_place = _of_rows(arithmetic.by_place)
    by_path = _of_rows(arithmetic.by_path)
    divergences = _of_rows(arithmetic.divergences)

    compared = _of_rows(lambda rows: len(arithmetic.compared(rows)))
    """Outputs that were compared with plain decoding's."""

    @property
    def hindsight(self) -> bool:
        """Whether it knows what will be accepted."""
        return self.method.partition(":")[0] == HINDSIGHT

    @cached_property
    def speedup(self) -> float | None:
        return arithmetic.speedup(self.pairs)

    @cached_property
    def spread(self) -> Spread | None:
        """Of the speedups prompt by prompt."""
        return arithmetic.spread(arithmetic.speedups(self.pairs))

    @cached_property
    def largest_margin(self) -> float | None:
        """Of the divergences; None where there are none, or where it is not known."""
        margins = [arithmetic.margin(row) for row in self.divergences]
        return max((each for each in margins if each != float("inf")), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Every figure as a plain value, for JSON."""
        rates = ("mat", "mat_without_loops", "discard_rate", "verification_rate", "repeated_4grams")
        return {
            "method": self.method,
            "label": self.label,
            "baseline": self.is_baseline,
            "prompts": len(self.rows),
            "failures": len(self.failures),
            "tokens": sum(row["tokens"] for row in self.rows),
            **{rate: getattr(self, rate) for rate in rates},
            "tokens_per_second": {"decoding": self.decoding, "whole_call": self.whole_call},
            "speedup": self.speedup,
            "speedup_of_prompts": self.spread and self.spread._asdict(),
            "compared": self.compared,
            "identical": self.compared - len(self.divergences),
            "largest_margin": self.largest_margin,
            "nodes_per_step": self.nodes,
            "seconds_per_step": self.parts,
            "steps_by_length": self.lengths,
        }


@dataclass
class Comparison:
    """Methods that were measured under the same conditions."""

    mode: str
    study: str | None
    point: str | None
    batch: int
    results: list[Result]
    """The baseline first, then as the rows have them."""

    @cached_property
    def baseline(self) -> Result | None:
        return next((result for result in self.results if result.is_baseline), None)

    @cached_property
    def raced(self) -> list[Result]:
        """The methods that can be called fast or slow, the fastest first: no baseline, and none that knows the end."""
        raced = [
            (each.speedup, each)
            for each in self.results
            if each.speedup is not None and not each.is_baseline and not each.hindsight
        ]
        return [result for _, result in sorted(raced, key=lambda each: -each[0])]

    @cached_property
    def categories(self) -> list[str]:
        found = dict.fromkeys(row["category"] for result in self.results for row in result.rows + result.failures)
        return _ordered(found, CATEGORIES)

    def as_dict(self) -> dict[str, Any]:
        """Every figure as a plain value, for JSON."""
        return {
            "mode": self.mode,
            "study": self.study,
            "point": self.point,
            "batch": self.batch,
            "results": [
                {**result.as_dict(), "categories": {name: result.of(name).as_dict() for name in self.categories}}
                for result in self.results
            ],
        }


@dataclass
class Summary:
    """All that a report shows."""

    rows: list[Row]
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)
    """What went wrong in reading."""

    @cached_property
    def methods(self) -> dict[str, str]:
        """Labels by method, in the order in which they are shown everywhere; the baselines first."""
        rows = arithmetic.grouped(self.rows, lambda row: row["method"])
        return {method: rows[method][0]["label"] for method in _ordered(rows, BASELINES)}

    @cached_property
    def results(self) -> list[Result]:
        """Of all comparisons."""
        return [result for each in self.comparisons for result in each.results]

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
        studied = (each for each in self.comparisons if each.study is not None and each.mode != "batch")
        return arithmetic.grouped(studied, lambda each: (each.mode, str(each.study)))

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        """Different ones, the date left out."""
        found = [{key: value for key, value in row["environment"].items() if key != "date"} for row in self.rows]
        by_text = arithmetic.grouped(found, lambda known: json.dumps(known, sort_keys=True))
        return [alike[0] for alike in by_text.values()]


Curve = list[tuple[str, Result]]
"""Points and what was measured there, in order."""


def curves(points: Sequence[Comparison]) -> dict[str, Curve]:
    """What belongs together in a study: a method that stands at several points, or methods of one drafter that differ
    from point to point.
    """
    found = [
        (each.point, result)
        for each in points
        if each.point is not None
        for result in each.results
        if not result.is_baseline and result.rows
    ]
    places = Counter(result.method for _, result in found)

    def name(measured: tuple[str, Result]) -> str:
        result = measured[1]
        return result.label if places[result.method] > 1 else result.method.partition(":")[0]

    return arithmetic.grouped(found, name)
