"""The arithmetic of a report: figures of methods from a frame of rows.

docs/benchmark.md lists the keys of a row and states every formula below. Tokens, steps and seconds are summed over rows
before they are divided, so that a long text counts for more than a short one. Rows of failed runs hold no measurements
and are left out. A figure that the rows do not give is NaN, never zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..row_format import CLOCKS

Row = dict[str, Any]
"""One line of `rows.jsonl`: one method on one prompt."""
_NUMBERS = ["tokens", "steps", "loop_tokens", "loop_steps", "repeated_4grams", "discarded"]
_COUNTS = ["parts", "lengths", "nodes", "tried", "accepted"]
_OTHERS = ["mode", "study", "point", "method", "label", "prompt", "category", "batch", "seconds", "total_seconds"]
_OTHERS += ["processor_seconds", "identical", "divergence", "failure", "temperature", "max_new_tokens", "seed"]
_OTHERS += ["environment"]
_TERMS = ["tokens", "call_seconds", "base_tokens", "base_call_seconds"]
"""What a speedup is computed from, the baseline's after the method's."""
QUARTILES = ["least", "lower", "median", "upper", "most"]
_WHOLE = ["prompts", "tokens", "compared", "identical", "failures"]
FIGURES = ["mat", "mat_without_loops", "discard_rate", "verification_rate", "repeated_4grams", "decoding", "whole_call"]
FIGURES += ["drafted", "largest_margin", "speedup", *QUARTILES, *_WHOLE]
"""The columns of `figures`."""


def frame(rows: Iterable[Row], clock: str = "wall") -> pd.DataFrame:
    """Rows as a frame, with the medians of their repetitions by a clock of `CLOCKS`, in seconds."""
    found = pd.DataFrame(list(rows), columns=[*_OTHERS, *_NUMBERS, *_COUNTS], dtype=object)
    found[_NUMBERS] = found[_NUMBERS].astype(float)
    for column in _COUNTS:
        found[column] = found[column].map(lambda counts: counts if isinstance(counts, (dict, list)) else {})
    for column, key in zip(("decoding_seconds", "call_seconds"), CLOCKS[clock], strict=True):
        found[column] = found[key].map(statistics.median, na_action="ignore").astype(float)
    found["margin"] = found["divergence"].map(_margin).where(found["identical"].eq(False)).astype(float)
    return found


def _margin(divergence: Any) -> float:
    """Difference of the two logits where an output first differs; infinite where it is not known."""
    known = isinstance(divergence, dict) and divergence["margin"] is not None
    return abs(divergence["margin"]) if known else float("inf")


def finished(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without a failure."""
    return rows[rows["failure"].isna()]


def figures(rows: pd.DataFrame, pairs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """`FIGURES` of each group of rows; `pairs` are those of `paired`."""
    done = finished(rows)
    said = done["tokens"].where(_answered(done))
    terms = {
        "mat": (done["tokens"], done["steps"]),
        "mat_without_loops": (done["tokens"] - done["loop_tokens"], done["steps"] - done["loop_steps"]),
        "discard_rate": (done["discarded"], done["tokens"]),
        "verification_rate": (done["steps"], done["tokens"]),
        "repeated_4grams": (done["repeated_4grams"] * done["tokens"], done["tokens"]),
        "decoding": (said, done["decoding_seconds"]),
        "whole_call": (said, done["call_seconds"]),
        "drafted": (
            done["nodes"].map(lambda counts: sum((int(nodes) - 1) * steps for nodes, steps in counts.items())),
            done["nodes"].map(lambda counts: sum(counts.values())),
        ),
    }
    keys = [done[key] for key in by]
    found = pd.DataFrame({name: _ratio(above, below, keys) for name, (above, below) in terms.items()})
    groups = done.groupby(by, sort=False)
    found["prompts"], found["tokens"] = groups.size(), groups["tokens"].sum()
    found["compared"], found["identical"] = groups["identical"].count(), done["identical"].eq(True).groupby(keys).sum()
    found["largest_margin"] = groups["margin"].max()
    if len(pairs):
        found["speedup"] = speedup(pairs.groupby(by)[_TERMS].sum())
        found[QUARTILES] = pairs.groupby(by)["speedup"].quantile([0, 0.25, 0.5, 0.75, 1]).unstack()
    failures = rows.groupby(by, sort=False)["failure"].count()
    found = found.reindex(index=failures.index, columns=FIGURES)
    found["failures"] = failures
    found[_WHOLE] = found[_WHOLE].fillna(0).astype(int)
    return found


def _answered(rows: pd.DataFrame) -> pd.Series:
    """Whether any text of a row went beyond its first token, which comes from the prompt's forward pass: else nothing
    was decoded, and there is no speed.
    """
    return rows["tokens"].astype(float) > rows["batch"].astype(float).fillna(1)


def _ratio(above: pd.Series, below: pd.Series, keys: Sequence[pd.Series]) -> pd.Series:
    """The sum of one by that of the other, over the rows of a group that have both."""
    known = above.notna() & below.notna()
    sums = pd.DataFrame({"above": above.where(known), "below": below.where(known)}).astype(float)
    sums = sums.groupby(list(keys), sort=False).sum()
    return sums["above"] / sums["below"].where(sums["below"] > 0)


def paired(rows: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Rows of the prompts that the baseline finished too, both with an answer, and the speedup of each."""
    ours, theirs = (each[each["failure"].isna() & _answered(each)] for each in (rows, baseline))
    others = theirs.set_index("prompt")[_TERMS[:2]].add_prefix("base_")
    found = ours.join(others, on="prompt", how="inner")
    return found.assign(speedup=speedup(found))


def speedup(sums: pd.DataFrame) -> pd.Series:
    """The baseline's seconds a token by the method's, of whole calls.

    Where both gave the same number of tokens, as identical output does, this is the ratio of the times.
    """
    return sums["tokens"] / sums["call_seconds"] * sums["base_call_seconds"] / sums["base_tokens"]


def resampled(pairs: pd.DataFrame, draws: int = 2000) -> np.ndarray:
    """(draws,): a method's speedup over prompts drawn anew, with replacement; equal draws for equal prompts."""
    values = pairs.sort_values("prompt")[_TERMS].to_numpy(float)
    drawn = np.random.default_rng(0).integers(len(values), size=(draws, len(values)))
    return speedup(pd.DataFrame(values[drawn].sum(axis=1), columns=_TERMS)).to_numpy()


def interval(pairs: pd.DataFrame) -> tuple[float, float] | None:
    """The middle 95% of a method's speedup over prompts drawn anew; None for one prompt, of which nothing is known."""
    if len(pairs) < 2:
        return None
    low, high = np.quantile(resampled(pairs), (0.025, 0.975))
    return float(low), float(high)


def repeat_spread(times: Iterable[list[float]]) -> float | None:
    """How far repetitions of one prompt lie apart: slowest less fastest by the median, the median of all rows."""
    repeated = [each for each in times if len(each) > 1 and statistics.median(each)]
    apart = [(max(each) - min(each)) / statistics.median(each) for each in repeated]
    return statistics.median(apart) if apart else None


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds a step by method and part of a step: the parts' sums by the steps of the rows that have them."""
    timed = finished(rows)[lambda each: each["parts"].map(bool).astype(bool)]
    seconds = pd.DataFrame(timed["parts"].tolist(), index=timed["method"])
    steps = timed.groupby("method", sort=False)["steps"].sum()
    return seconds.groupby(level=0, sort=False).sum(min_count=1).div(steps, axis=0)


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of a method's steps by the number of tokens they gave."""
    known = finished(rows)[lambda each: each["lengths"].map(bool).astype(bool)]
    steps = pd.DataFrame(known["lengths"].tolist(), index=known["method"]).rename(columns=int).sort_index(axis=1)
    steps = steps.groupby(level=0, sort=False).sum()
    return steps.div(steps.sum(axis=1), axis=0)


def places(rows: pd.DataFrame) -> pd.Series:
    """Accepted nodes by those whose parent was, by method, depth and rank."""

    def counted(key: str) -> pd.Series:
        listed = finished(rows)[["method", key]].explode(key).dropna()
        cells = pd.DataFrame(listed[key].tolist(), columns=["depth", "rank", "nodes"])
        return cells.assign(method=listed["method"].to_numpy()).groupby(["method", "depth", "rank"])["nodes"].sum()

    tried = counted("tried")
    return counted("accepted").reindex(tried.index, fill_value=0) / tried
