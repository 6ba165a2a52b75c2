"""Figures from `rows.jsonl`: methods grouped by measuring conditions, with the baseline of their speedups.

`store` lists the keys of a row, docs/benchmarks.md the formulas. Tokens, steps and seconds are summed over rows before
they are divided, so a long output weighs more than a short one. Rows of failed runs are excluded. A figure that the
rows do not provide is NaN, never zero.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from scipy.stats import bootstrap

from .data import BASELINES, HINDSIGHT
from .store import CLOCKS, MODES, ROWS, VERSION, Row

# Figures of methods from a frame of rows


_NUMBERS = ["batch", "tokens", "first_tokens", "steps", "loop_tokens", "loop_steps", "repeated_4grams", "discarded"]
_COUNTS = ["parts", "nodes", "tried", "accepted"]
_OTHERS = ["mode", "method", "label", "prompt", "category", "seconds", "total_seconds"]
_OTHERS += ["processor_seconds", "identical", "divergence", "failure", "temperature", "max_new_tokens", "seed"]
_OTHERS += ["environment", "run", "prefill_seconds", "turns", "last_prefill_seconds"]
TERMS = ["tokens", "call_seconds", "base_tokens", "base_call_seconds"]
"""Columns that a speedup is computed from: the method's, then the baseline's."""
QUARTILES = ["lower", "median", "upper"]
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
"""Columns of `figures`."""


def frame_of(rows: Iterable[Row], clock: str = "wall") -> pd.DataFrame:
    """Return rows as a frame, with the medians of their repetitions by a clock of `CLOCKS`, in seconds."""
    table = pd.DataFrame(list(rows), columns=[*_OTHERS, *_NUMBERS, *_COUNTS], dtype=object)
    table[_NUMBERS] = table[_NUMBERS].astype(float)
    for column in _COUNTS:
        table[column] = table[column].map(lambda counts: counts if isinstance(counts, (dict, list)) else {})
    for column, key in zip(("decoding_seconds", "call_seconds"), CLOCKS[clock], strict=True):
        table[column] = table[key].map(statistics.median, na_action="ignore").astype(float)
    # Decoding starts after the first forward pass, which emits a token per sequence. Processor time covers whole calls.
    first = table["first_tokens"].fillna(table["batch"]).fillna(1)
    table["decoded"] = table["tokens"] - (first if clock == "wall" else 0)
    table["first_token_seconds"] = table["prefill_seconds"].map(statistics.median, na_action="ignore").astype(float)
    table["last_first_token_seconds"] = (
        table["last_prefill_seconds"].map(statistics.median, na_action="ignore").astype(float)
    )
    table["margin"] = table["divergence"].map(_margin).where(table["identical"].eq(False)).astype(float)
    return table


def _margin(divergence: Any) -> float:
    """Return the difference of the two logits at the first divergence; infinite if unknown."""
    measured = isinstance(divergence, dict) and divergence["margin"] is not None
    return abs(divergence["margin"]) if measured else float("inf")


def finished(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows without a failure."""
    return rows[rows["failure"].isna()]


def figures_of(rows: pd.DataFrame, pairs: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the `FIGURES` of each group of rows; `pairs` is the result of `paired`."""
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
    table = pd.DataFrame(index=rows.groupby(by, sort=False).size().index, columns=FIGURES, dtype=float)
    for name, (above, below) in ratios.items():
        # Only rows with both values count.
        rows_with_both = pd.DataFrame({"above": above, "below": below}, dtype=float).dropna()
        sums = rows_with_both.join(done[by]).groupby(by)[["above", "below"]].sum()
        table[name] = sums["above"] / sums["below"].where(sums["below"] > 0)
    if len(pairs):
        table["speedup"] = speedup_of(pairs.groupby(by)[TERMS].sum())
        table[QUARTILES] = pairs.groupby(by)["speedup"].quantile([0.25, 0.5, 0.75]).unstack()
    groups = done.assign(identical=done["identical"].eq(True), compared=done["identical"].notna()).groupby(by)
    table["largest_margin"], table["prompts"] = groups["margin"].max(), groups.size()
    table[["tokens", "compared", "identical"]] = groups[["tokens", "compared", "identical"]].sum()
    table["failures"] = rows.groupby(by)["failure"].count()
    table[_WHOLE] = table[_WHOLE].fillna(0).astype(int)
    return table


def _answered(rows: pd.DataFrame) -> pd.Series:
    """Return whether any sequence of a row has more than one token. The first token comes from the prompt's forward
    pass, so with one token nothing was decoded and there is no speed.
    """
    return rows["tokens"] > rows["batch"].fillna(1)


def paired(rows: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Return the rows, with their speedups, of prompts that the baseline also finished, both with an answer."""
    ours, theirs = (each[each["failure"].isna() & _answered(each)] for each in (rows, baseline))
    table = ours.join(theirs.set_index("prompt")[TERMS[:2]].add_prefix("base_"), on="prompt", how="inner")
    return table.assign(speedup=speedup_of(table))


def overall_speedup(pairs: pd.DataFrame) -> float:
    """Return the speedup over all pairs; NaN if there are none."""
    return float(speedup_of(pairs[TERMS].sum()))


def speedup_of(sums: pd.DataFrame) -> pd.Series:
    """Return the baseline's seconds per token / the method's, over whole calls.

    If both emitted the same number of tokens, as with identical outputs, this is the ratio of the times.
    """
    return sums["tokens"] / sums["call_seconds"] * sums["base_call_seconds"] / sums["base_tokens"]


def interval_of(sums: pd.DataFrame) -> tuple[float, float]:
    """Return the 95% bootstrap CI over prompts of a speedup; `sums` has one row per prompt with the columns `TERMS`.
    For a single prompt the interval is 0 to infinity.
    """
    if len(sums) < 2:
        return 0.0, float("inf")

    def ratio(tokens: Any, seconds: Any, base_tokens: Any, base_seconds: Any, axis: int) -> Any:
        return tokens.sum(axis) / seconds.sum(axis) * base_seconds.sum(axis) / base_tokens.sum(axis)

    columns = tuple(sums.sort_values("prompt")[TERMS].to_numpy(float).T)
    table = bootstrap(
        columns, ratio, paired=True, vectorized=True, n_resamples=2000, method="percentile", random_state=0
    )
    return float(table.confidence_interval.low), float(table.confidence_interval.high)


def repeat_spread(times: Iterable[list[float]]) -> float | None:
    """Return the spread of a prompt's repetitions: (slowest - fastest) / median, as the median over all rows."""
    repeated = [each for each in times if len(each) > 1 and statistics.median(each)]
    apart = [(max(each) - min(each)) / statistics.median(each) for each in repeated]
    return statistics.median(apart) if apart else None


def seconds_per_step(rows: pd.DataFrame) -> pd.DataFrame:
    """Return seconds per step by method and part of a step: sums of the parts / steps of the rows that have them."""
    timed_rows = finished(rows)[lambda each: each["parts"].astype(bool)].set_index("method")
    seconds, steps = pd.DataFrame(timed_rows["parts"].tolist(), index=timed_rows.index), timed_rows["steps"]
    return seconds.groupby(level=0, sort=False).sum(min_count=1).div(steps.groupby(level=0).sum(), axis=0)


def acceptance_by_node(rows: pd.DataFrame) -> pd.Series:
    """Return accepted nodes / nodes whose parent was accepted, by method, depth and rank."""

    def counted(key: str) -> pd.Series:
        listed = finished(rows).set_index("method")[key].explode().dropna()
        cells = pd.DataFrame(listed.tolist(), listed.index, ["depth", "rank", "nodes"])
        return cells.groupby(["method", "depth", "rank"])["nodes"].sum().astype(float)

    tried = counted("tried")
    return counted("accepted").reindex(tried.index, fill_value=0) / tried


# Grouping of rows into comparisons


REQUIRED = ("mode", "method", "label", "prompt", "category", "batch", "failure", "environment")
_CONDITIONS = ("run", "mode", "batch")
_HEADINGS = {
    "mt_bench": "MT",
    "translation": "Trans",
    "summarization": "Sum",
    "qa": "QA",
    "math_reasoning": "Math",
    "rag": "RAG",
    "mbpp": "MBPP",
}
"""Column heads as in table 1 of the paper."""
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "mbpp")
"""Columns in the order of table 1 of the Token Recycling paper; other categories follow in order of appearance."""


def heading(category: str) -> str:
    """Return the column head of a category."""
    return _HEADINGS.get(category, category.replace("_", " "))


def parse(folder: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a folder, or of the runs in its subfolders, and notes about them."""
    if (folder / ROWS).is_file():
        return _parse(folder, "")
    runs = sorted(file.parent for file in folder.glob(f"*/{ROWS}"))
    if not runs:
        raise ValueError(f"no {ROWS}, written by `token-recycling bench`, in {folder} or its subfolders")
    rows, notes = [], []
    for run in runs:
        rows_of_run, notes_of_run = _parse(run, run.name)
        rows += rows_of_run
        notes += [f"{run.name}: {note}" for note in notes_of_run]
    return rows, notes


def _parse(folder: Path, run: str) -> tuple[list[Row], list[str]]:
    file = folder / ROWS
    lines = file.read_text(encoding="utf-8").splitlines()
    rows, notes = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):
                notes.append(f"The last line of {ROWS} is incomplete, as after an interruption; it was ignored.")
                continue
            raise ValueError(f"line {number} of {file} must be a JSON object, got {line[:60]!r}") from None
        version = row.get("version") if isinstance(row, dict) else None
        if version != VERSION:
            raise ValueError(
                f"rows must be of version {VERSION}, got {version!r} in line {number} of {file}: measure again"
            )
        if missing := [key for key in REQUIRED if key not in row]:
            raise ValueError(f"line {number} of {file} lacks the keys {', '.join(missing)}: measure again")
        rows.append({**row, "run": run})
    if not rows:
        raise ValueError(f"no measurements in {file}: run `token-recycling bench` first")
    # The later row counts, in the position of the earlier one.
    last = {tuple(row[name] for name in (*_CONDITIONS, "method", "prompt")): row for row in rows}
    # In batches that is not an error: the rest of one size can be a whole batch of another.
    before, after = (sum(row["mode"] != "batch" for row in some) for some in (rows, last.values()))
    notes += [f"{before - after} rows were measured again; the later ones count."] * (after < before)
    return list(last.values()), notes


def read(folder: Path, baseline: str | None = None, clock: str = "wall") -> Summary:
    """Read the rows of a folder and group them into comparisons.

    `baseline` is the method that speedups refer to; `clock` is "wall" or "processor". Raises ValueError if the folder
    has no measurements, or if the rows lack the baseline or the clock.
    """
    rows, notes = parse(folder)
    return summarize(rows, baseline, clock, notes)


def summarize(
    rows: Sequence[Row], baseline: str | None = None, clock: str = "wall", notes: Sequence[str] = ()
) -> Summary:
    """Group rows that were measured under the same conditions, and find the baseline of each group."""
    every = frame_of(rows, clock)
    methods = every["method"].unique().tolist()
    if baseline is not None and baseline not in methods:
        raise ValueError(f"the baseline must be a measured method ({', '.join(methods)}), got {baseline!r}")
    if finished(every)["call_seconds"].isna().any():
        raise ValueError(f"some rows lack {CLOCKS[clock][1]}: use the other --clock")
    keys = pd.Series([(row.get("run", ""), *(row[name] for name in _CONDITIONS[1:])) for row in rows])
    groups = dict(iter(every.groupby(keys, sort=False)))
    candidates = (baseline,) if baseline else BASELINES
    table = []
    order = [*MODES, *sorted({key[1] for key in groups} - set(MODES))]
    for key in sorted(groups, key=lambda key: (key[0], order.index(key[1]), key[2] or 0)):
        run, mode, batch = key
        own = groups[key]
        chosen = next((name for name in candidates if name in set(own["method"])), None)
        labels = own.groupby("method")["label"].last()
        shown = ordered(methods, [chosen] if chosen else [])
        table.append(
            Comparison(
                *(run, mode, batch or 1, own, paired(own, own[own["method"] == chosen])),
                {method: labels[method] for method in shown if method in labels},
                chosen,
            )
        )
    return Summary(every, table, clock, list(notes))


def ordered(names: Collection[str], first: Sequence[str]) -> list[str]:
    """Return names without duplicates, in their order except that those in `first` precede the others."""
    return [*(name for name in first if name in names), *(n for n in dict.fromkeys(names) if n not in first)]


@dataclass
class Comparison:
    """Methods measured under the same conditions."""

    run: str
    """The subfolder, if a report covers several runs."""
    mode: str
    batch: int
    rows: pd.DataFrame
    """Rows as returned by `frame_of`."""
    pairs: pd.DataFrame
    """The rows that have a speedup."""
    labels: dict[str, str]
    """Labels by method, in display order: the baseline first."""
    baseline: str | None
    """Method that speedups refer to, if it was measured under these conditions."""

    @cached_property
    def figures(self) -> pd.DataFrame:
        """`FIGURES` by method, and its `label`."""
        table = figures_of(self.rows, self.pairs, ["method"]).loc[list(self.labels)]
        return table.assign(label=list(self.labels.values()))

    @cached_property
    def by_category(self) -> pd.DataFrame:
        """`FIGURES` by category and method."""
        return figures_of(self.rows, self.pairs, ["category", "method"])

    @cached_property
    def categories(self) -> list[str]:
        return ordered(self.rows["category"].tolist(), CATEGORIES)

    @cached_property
    def parts(self) -> pd.DataFrame:
        """Seconds per step, by method and part."""
        table = seconds_per_step(self.rows)
        return table.loc[[method for method in self.labels if method in table.index]]

    @cached_property
    def acceptance(self) -> pd.Series:
        """Accepted nodes / nodes whose parent was accepted, by method, depth and rank."""
        return acceptance_by_node(self.rows)

    @cached_property
    def speedups(self) -> pd.Series:
        """Speedups of methods, fastest first, without the baseline and the oracle."""
        table = self.figures["speedup"].dropna()
        raced = [each != self.baseline and each.partition(":")[0] != HINDSIGHT for each in table.index]
        return table[raced].sort_values(ascending=False, kind="stable")

    def pairs_of(self, method: str) -> pd.DataFrame:
        """Return the rows of a method that have a speedup."""
        return self.pairs[self.pairs["method"] == method]

    def as_dict(self) -> dict[str, Any]:
        """Return every figure as a plain value for JSON, which has neither NaN nor infinity."""
        results = _records(self.figures.assign(baseline=self.figures.index == self.baseline))
        for line, figures in (("categories", self.by_category), ("seconds_per_step", self.parts)):
            for result in results:
                lines = figures[figures.index.get_level_values("method") == result["method"]]
                result[line] = _records(lines)
        conditions = {"run": self.run, "mode": self.mode, "batch": self.batch}
        return {**conditions, "baseline": self.baseline, "results": results}


def _records(figures: pd.DataFrame) -> list[dict[str, Any]]:
    table = json.loads(figures.reset_index().to_json(orient="records", double_precision=15))
    return list(table)


@dataclass
class Summary:
    """All data of a report."""

    rows: pd.DataFrame
    comparisons: list[Comparison]
    clock: str = "wall"
    """Clock that times were measured with, a key of `CLOCKS`."""
    notes: list[str] = field(default_factory=list)
    """Problems found while reading the rows."""

    @cached_property
    def methods(self) -> dict[str, str]:
        """Labels by method, in display order; the baselines first."""
        labels = self.rows.groupby("method", sort=False)["label"].first()
        return {method: labels[method] for method in ordered(labels.index.tolist(), BASELINES)}

    @cached_property
    def main(self) -> list[Comparison]:
        """Comparisons in which prompts were decoded one at a time."""
        return [each for each in self.comparisons if each.mode != "batch"]

    @cached_property
    def batches(self) -> list[Comparison]:
        """Comparisons of batches, ordered by batch size."""
        return [each for each in self.comparisons if each.mode == "batch"]

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        """Distinct environments, ignoring the date."""
        table = [
            {key: value for key, value in environment.items() if key != "date"}
            for environment in self.rows["environment"]
        ]
        return list({json.dumps(environment, sort_keys=True): environment for environment in table}.values())
