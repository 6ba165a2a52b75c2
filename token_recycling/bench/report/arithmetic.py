"""The arithmetic of a report: figures of methods from a frame of rows.

docs/benchmarks.md lists the keys of a row and the formulas. Tokens, steps and seconds are summed over rows before they
are divided, so that a long output counts for more than a short one. Rows of failed runs are left out. A figure that the
rows do not give is NaN, never zero.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import pandas as pd
from scipy.stats import bootstrap

from ..row_format import CLOCKS

Row = dict[str, Any]
"""One line of `rows.jsonl`: one method on one prompt."""
_NUMBERS = ["batch", "tokens", "first_tokens", "steps", "loop_tokens", "loop_steps", "repeated_4grams", "discarded"]
_COUNTS = ["parts", "lengths", "nodes", "tried", "accepted"]
_OTHERS = ["mode", "method", "label", "prompt", "category", "seconds", "total_seconds"]
_OTHERS += ["processor_seconds", "identical", "divergence", "failure", "temperature", "max_new_tokens", "seed"]
_OTHERS += ["environment", "run", "prefill_seconds", "turns", "last_prefill_seconds"]
TERMS = ["tokens", "call_seconds", "base_tokens", "base_call_seconds"]
"""What a speedup is computed from, the baseline's after the method's."""
QUARTILES = ["least", "lower", "median", "upper", "most"]
_WHOLE = ["prompts", "tokens", "compared", "identical", "failures"]
FIGURES = ["mat", "mat_without_loops", "discard_rate", "repeated_4grams", "decoding", "whole_call"]
FIGURES += [
    "first_token",
    "mat_first_quarter",
    "mat_last_quarter",
    "drafted",
    "largest_margin",
    "speedup",
    *QUARTILES,
    *_WHOLE,
]
"""The columns of `figures`."""


def frame(rows: Iterable[Row], clock: str = "wall") -> pd.DataFrame:
    """Rows as a frame, with the medians of their repetitions by a clock of `CLOCKS`, in seconds."""
    found = pd.DataFrame(list(rows), columns=[*_OTHERS, *_NUMBERS, *_COUNTS], dtype=object)
    found[_NUMBERS] = found[_NUMBERS].astype(float)
    for column in _COUNTS:
        found[column] = found[column].map(lambda counts: counts if isinstance(counts, (dict, list)) else {})
    for column, key in zip(("decoding_seconds", "call_seconds"), CLOCKS[clock], strict=True):
        found[column] = found[key].map(statistics.median, na_action="ignore").astype(float)
    # Decoding begins after the first forward pass, which emits a token of each text; processor time is of whole calls.
    first = found["first_tokens"].fillna(found["batch"]).fillna(1)
    found["decoded"] = found["tokens"] - (first if clock == "wall" else 0)
    found["first_token_seconds"] = found["prefill_seconds"].map(statistics.median, na_action="ignore").astype(float)
    found["last_first_token_seconds"] = (
        found["last_prefill_seconds"].map(statistics.median, na_action="ignore").astype(float)
    )
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
    decoded = done["tokens"].where(_answered(done))
    steps = done["nodes"].map(lambda counts: sum(counts.values()))
    place = (done.groupby(by).cumcount() + 0.5) / done.groupby(by)["tokens"].transform("size")
    ratios = {
        "mat": (done["tokens"], done["steps"]),
        "mat_without_loops": (done["tokens"] - done["loop_tokens"], done["steps"] - done["loop_steps"]),
        "discard_rate": (done["discarded"], done["tokens"]),
        "repeated_4grams": (done["repeated_4grams"] * done["tokens"], done["tokens"]),
        "decoding": (done["decoded"].where(_answered(done)), done["decoding_seconds"]),
        "whole_call": (decoded, done["call_seconds"]),
        "first_token": (done["first_token_seconds"], done["tokens"].mask(done["tokens"].notna(), 1)),
        "mat_first_quarter": (done["tokens"].where(place < 0.25), done["steps"]),
        "mat_last_quarter": (done["tokens"].where(place > 0.75), done["steps"]),
        "drafted": (
            done["nodes"].map(lambda counts: sum(int(nodes) * n for nodes, n in counts.items())) - steps,
            steps,
        ),
    }
    found = pd.DataFrame(index=rows.groupby(by, sort=False).size().index, columns=FIGURES, dtype=float)
    for name, (above, below) in ratios.items():
        # Over the rows that have both.
        known = pd.DataFrame({"above": above, "below": below}, dtype=float).dropna()
        sums = known.join(done[by]).groupby(by)[["above", "below"]].sum()
        found[name] = sums["above"] / sums["below"].where(sums["below"] > 0)
    if len(pairs):
        found["speedup"] = speedup(pairs.groupby(by)[TERMS].sum())
        found[QUARTILES] = pairs.groupby(by)["speedup"].quantile([0, 0.25, 0.5, 0.75, 1]).unstack()
    groups = done.assign(identical=done["identical"].eq(True), compared=done["identical"].notna()).groupby(by)
    found["largest_margin"], found["prompts"] = groups["margin"].max(), groups.size()
    found[["tokens", "compared", "identical"]] = groups[["tokens", "compared", "identical"]].sum()
    found["failures"] = rows.groupby(by)["failure"].count()
    found[_WHOLE] = found[_WHOLE].fillna(0).astype(int)
    return found


def last_turns(rows: pd.DataFrame, baseline: str) -> pd.Series:
    """Speedup of the time to the first token of the last turn, by category and method, of conversations."""
    known = finished(rows)[lambda each: each["turns"].fillna(1).astype(int) > 1]
    seconds = known.groupby(["category", "method"], sort=False)["last_first_token_seconds"].sum().unstack("method")
    if baseline not in seconds:
        return pd.Series(dtype=float)
    return (1 / seconds.div(seconds[baseline], axis=0)).stack()


def _answered(rows: pd.DataFrame) -> pd.Series:
    """Whether any text of a row went beyond its first token, which comes from the prompt's forward pass: else nothing
    was decoded, and there is no speed.
    """
    return rows["tokens"] > rows["batch"].fillna(1)


def paired(rows: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Rows of the prompts that the baseline finished too, both with an answer, and the speedup of each."""
    ours, theirs = (each[each["failure"].isna() & _answered(each)] for each in (rows, baseline))
    found = ours.join(theirs.set_index("prompt")[TERMS[:2]].add_prefix("base_"), on="prompt", how="inner")
    return found.assign(speedup=speedup(found))


def speedup(sums: pd.DataFrame) -> pd.Series:
    """The baseline's seconds a token by the method's, of whole calls.

    Where both gave the same number of tokens, as identical output does, this is the ratio of the times.
    """
    return sums["tokens"] / sums["call_seconds"] * sums["base_call_seconds"] / sums["base_tokens"]


def interval(sums: pd.DataFrame) -> tuple[float, float]:
    """The 95% bootstrap CI over prompts of a speedup; `sums` has a line a prompt with the columns of a speedup. Of a
    single prompt nothing is known: from 0 to infinity.
    """
    if len(sums) < 2:
        return 0.0, float("inf")

    def ratio(tokens: Any, seconds: Any, base_tokens: Any, base_seconds: Any, axis: int) -> Any:
        return tokens.sum(axis) / seconds.sum(axis) * base_seconds.sum(axis) / base_tokens.sum(axis)

    columns = tuple(sums.sort_values("prompt")[TERMS].to_numpy(float).T)
    found = bootstrap(
        columns, ratio, paired=True, vectorized=True, n_resamples=2000, method="percentile", random_state=0
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def repeat_spread(times: Iterable[list[float]]) -> float | None:
    """How far repetitions of one prompt lie apart: slowest less fastest by the median, the median of all rows."""
    repeated = [each for each in times if len(each) > 1 and statistics.median(each)]
    apart = [(max(each) - min(each)) / statistics.median(each) for each in repeated]
    return statistics.median(apart) if apart else None


def parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Seconds a step by method and part of a step: the parts' sums by the steps of the rows that have them."""
    seconds, steps = _counted(rows, "parts")
    return seconds.groupby(level=0, sort=False).sum(min_count=1).div(steps.groupby(level=0).sum(), axis=0)


def lengths(rows: pd.DataFrame) -> pd.DataFrame:
    """Share of a method's steps by the number of tokens they gave."""
    steps = _counted(rows, "lengths")[0].rename(columns=int).sort_index(axis=1).groupby(level=0, sort=False).sum()
    return steps.div(steps.sum(axis=1), axis=0)


def _counted(rows: pd.DataFrame, key: str) -> tuple[pd.DataFrame, pd.Series]:
    """What rows counted under a key, a column for each name, and their steps; both by method."""
    known = finished(rows)[lambda each: each[key].astype(bool)].set_index("method")
    return pd.DataFrame(known[key].tolist(), index=known.index), known["steps"]


def places(rows: pd.DataFrame) -> pd.Series:
    """Accepted nodes by those whose parent was, by method, depth and rank."""

    def counted(key: str) -> pd.Series:
        listed = finished(rows).set_index("method")[key].explode().dropna()
        cells = pd.DataFrame(listed.tolist(), listed.index, ["depth", "rank", "nodes"])
        return cells.groupby(["method", "depth", "rank"])["nodes"].sum().astype(float)

    tried = counted("tried")
    return counted("accepted").reindex(tried.index, fill_value=0) / tried
