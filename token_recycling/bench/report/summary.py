"""From `rows.jsonl` to what a report shows: methods measured under the same conditions, and what speedups refer to."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..row_format import BASELINES, CLOCKS, HINDSIGHT, MODES, ROWS, VERSION
from . import arithmetic
from .arithmetic import Row

REQUIRED = ("mode", "method", "label", "prompt", "category", "batch", "failure", "environment")
_CONDITIONS = ("run", "mode", "batch")
CATEGORIES = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag", "mbpp")
"""Columns in the order of the Token Recycling paper's table 1; others follow as they appear."""


def parse(folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of a folder, or of the runs in its subfolders, and what a reader must know of them."""
    if (folder / ROWS).is_file():
        return _parse(folder, "")
    runs = sorted(file.parent for file in folder.glob(f"*/{ROWS}"))
    if not runs:
        raise ValueError(f"no {ROWS}, as `token-recycling bench` writes it, in {folder} or its subfolders")
    rows, notes = [], []
    for one in runs:
        own, said = _parse(one, one.name)
        rows += own
        notes += [f"{one.name}: {note}" for note in said]
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
                notes.append(f"The last line of {ROWS} is incomplete, as after an interruption; it was left out.")
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
    # The later one counts, at the place of the first.
    last = {tuple(row[name] for name in (*_CONDITIONS, "method", "prompt")): row for row in rows}
    # In batches that is no mistake: the rest of one size can be a whole batch of another.
    before, after = (sum(row["mode"] != "batch" for row in some) for some in (rows, last.values()))
    notes += [f"{before - after} rows were measured again; the later ones count."] * (after < before)
    return list(last.values()), notes


def read(folder: Path, baseline: str | None = None, clock: str = "wall") -> Summary:
    """The rows of a folder, put in order.

    `baseline` is the method that speedups refer to, `clock` what times are measured with: "wall" or "processor". Raises
    ValueError for what is not a folder of measurements, and where the rows lack the method or the clock.
    """
    rows, notes = parse(folder)
    return summarize(rows, baseline, clock, notes)


def summarize(
    rows: Sequence[Row], baseline: str | None = None, clock: str = "wall", notes: Sequence[str] = ()
) -> Summary:
    """Group rows that were measured under the same conditions, and find the baseline of each group."""
    every = arithmetic.frame(rows, clock)
    known = every["method"].unique().tolist()
    if baseline is not None and baseline not in known:
        raise ValueError(f"the baseline must be a measured method ({', '.join(known)}), got {baseline!r}")
    if arithmetic.finished(every)["call_seconds"].isna().any():
        raise ValueError(f"some rows lack {CLOCKS[clock][1]}: take the other --clock")
    keys = pd.Series([(row.get("run", ""), *(row[name] for name in _CONDITIONS[1:])) for row in rows])
    groups = dict(iter(every.groupby(keys, sort=False)))
    candidates = (baseline,) if baseline else BASELINES
    found = []
    order = [*MODES, *sorted({key[1] for key in groups} - set(MODES))]
    for key in sorted(groups, key=lambda key: (key[0], order.index(key[1]), key[2] or 0)):
        run, mode, batch = key
        own = groups[key]
        chosen = next((name for name in candidates if name in set(own["method"])), None)
        labels = own.groupby("method")["label"].last()
        shown = ordered(known, [chosen] if chosen else [])
        found.append(
            Comparison(
                *(run, mode, batch or 1, own, arithmetic.paired(own, own[own["method"] == chosen])),
                {method: labels[method] for method in shown if method in labels},
                chosen,
            )
        )
    return Summary(every, found, clock, list(notes))


def ordered(names: Collection[str], first: Sequence[str]) -> list[str]:
    """Names without repetitions in their order, but those in `first` before the others."""
    return [*(name for name in first if name in names), *(n for n in dict.fromkeys(names) if n not in first)]


@dataclass
class Comparison:
    """Methods that were measured under the same conditions."""

    run: str
    """The subfolder, where a report is of several runs."""
    mode: str
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
        """Every figure as a plain value, for JSON, which knows neither NaN nor infinity."""
        results = _records(self.figures.assign(baseline=self.figures.index == self.baseline))
        for line, known in (
            ("categories", self.by_category),
            ("seconds_per_step", self.parts),
            ("steps_by_length", arithmetic.lengths(self.rows)),
        ):
            for one in results:
                own = known[known.index.get_level_values("method") == one["method"]]
                one[line] = _records(own)
        conditions = {"run": self.run, "mode": self.mode, "batch": self.batch}
        return {**conditions, "baseline": self.baseline, "results": results}


def _records(figures: pd.DataFrame) -> list[dict[str, Any]]:
    found = json.loads(figures.reset_index().to_json(orient="records", double_precision=15))
    return list(found)


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
        """The comparisons of one prompt at a time."""
        return [each for each in self.comparisons if each.mode != "batch"]

    @cached_property
    def batches(self) -> list[Comparison]:
        """Several prompts in one call, by their number."""
        return [each for each in self.comparisons if each.mode == "batch"]

    @cached_property
    def environments(self) -> list[dict[str, Any]]:
        """Different ones, the date left out."""
        found = [{key: value for key, value in known.items() if key != "date"} for known in self.rows["environment"]]
        return list({json.dumps(known, sort_keys=True): known for known in found}.values())
