"""From `rows.jsonl` to a summary: rows are checked, put in order, and grouped by what they were measured under."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..row_format import BASELINES, CLOCKS, MODES, ROWS, VERSION
from . import arithmetic
from .arithmetic import Row
from .summary import Comparison, Summary

REQUIRED = ("mode", "study", "point", "method", "label", "prompt", "category", "batch", "failure", "environment")
_CONDITIONS = ("mode", "study", "point", "batch")


def read(folder: Path, baseline: str | None = None, clock: str = "wall") -> Summary:
    """The rows of a folder, put in order.

    `baseline` is the method that speedups refer to, `clock` what times are measured with: "wall" or "processor". Raises
    ValueError for what is not a folder of measurements, and where the rows lack the method or the clock.
    """
    rows, notes = parse(folder)
    return summarize(rows, baseline, clock, notes)


def parse(folder: Path) -> tuple[list[Row], list[str]]:
    """The rows of a folder as they were written, and what a reader must know of them."""
    file = folder / ROWS
    if not file.is_file():
        raise ValueError(f"expected a folder with {ROWS}, as `token-recycling bench` writes it, got {folder}")
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
            raise ValueError(f"expected a JSON object in line {number} of {file}, got {line[:60]!r}") from None
        place, version = f"line {number} of {file}", row.get("version") if isinstance(row, dict) else None
        if version != VERSION:
            raise ValueError(f"expected rows of version {VERSION}, got {version!r} in {place}: measure again")
        missing = [key for key in REQUIRED if key not in row]
        if missing:
            raise ValueError(f"expected the keys {', '.join(missing)} in {place}, got none: measure again")
        rows.append(row)
    if not rows:
        raise ValueError(f"expected measurements in {file}, got none: run `token-recycling bench` first")
    rows, doubled = _last_of_each(rows)
    return rows, notes + [f"{doubled} rows were measured again; the later ones count."] * bool(doubled)


def _last_of_each(rows: Iterable[Row]) -> tuple[list[Row], int]:
    """Rows measured twice count once, the later one at the place of the first; and how many there were.

    In batches that is no mistake: what is left over by one size can be a whole batch of another.
    """
    found: dict[tuple[Any, ...], Row] = {}
    doubled = 0
    for row in rows:
        key = tuple(row[name] for name in (*_CONDITIONS, "method", "prompt"))
        doubled += key in found and row["mode"] != "batch"
        found[key] = row
    return list(found.values()), doubled


def summarize(
    rows: Sequence[Row], baseline: str | None = None, clock: str = "wall", notes: Sequence[str] = ()
) -> Summary:
    """Group rows that were measured under the same conditions, and find the baseline of each group."""
    found = arithmetic.frame(rows, clock)
    known = list(dict.fromkeys(found["method"]))
    if baseline is not None and baseline not in known:
        raise ValueError(f"expected a measured method as the baseline, one of {', '.join(known)}; got {baseline!r}")
    if arithmetic.finished(found)["call_seconds"].isna().any():
        raise ValueError(f"expected the key {CLOCKS[clock][1]} in all rows, got some without: take the other --clock")
    candidates = (baseline,) if baseline else BASELINES
    groups: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*(found[name] for name in _CONDITIONS), strict=True)):
        groups.setdefault(key, []).append(place)
    order = sorted(groups, key=lambda key: (key[1] is not None, [*MODES, key[0]].index(key[0]), key[3] or 0))
    by_key = {key: found.iloc[places] for key, places in groups.items()}
    return Summary(found, [_comparison(key, by_key, candidates, known) for key in order], clock, list(notes))


def _comparison(
    key: tuple[Any, ...], groups: dict[tuple[Any, ...], pd.DataFrame], candidates: Iterable[str], known: list[str]
) -> Comparison:
    mode, study, point, batch = key
    rows = groups[key]
    # A study may measure its baseline once for all points, in rows without a point.
    others = groups.get((mode, study, None, batch), rows[:0])
    here, there = set(rows["method"]), set(others["method"])
    baseline = next((name for name in candidates if name in here | there), None)
    against = rows if baseline in here else others
    labels = rows.groupby("method", sort=False)["label"].last()
    measured = baseline if baseline in here else None
    shown = sorted(labels.index, key=lambda method: (method != measured, known.index(method)))
    pairs = arithmetic.paired(rows, against[against["method"] == baseline])
    return Comparison(mode, study, point, batch or 1, rows, pairs, {each: labels[each] for each in shown}, measured)
