"""From `rows.jsonl` to a summary: rows are checked, put in order, and grouped by what they were measured under."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..row_format import MODES, ROWS, VERSION
from . import arithmetic
from .arithmetic import Row
from .summary import BASELINES, Comparison, Result, Summary

REQUIRED = ("mode", "study", "point", "method", "label", "prompt", "category", "batch", "failure", "environment")


def read(folder: Path, baseline: str | None = None) -> Summary:
    """The rows of a folder, put in order; ValueError for what is not a folder of measurements."""
    file = folder / ROWS
    if not file.is_file():
        raise ValueError(f"expected a folder with {ROWS}, as `token-recycling bench` writes it, got {folder}")
    rows, notes = _parsed(file)
    if not rows:
        raise ValueError(f"expected measurements in {file}, got none: run `token-recycling bench` first")
    rows, doubled = _last_of_each(rows)
    if doubled:
        notes.append(f"{doubled} rows were measured again; the later ones count.")
    return Summary(rows, compare(rows, baseline), notes)


def compare(rows: Sequence[Row], baseline: str | None = None) -> list[Comparison]:
    """Groups rows that were measured under the same conditions, and finds the baseline of each group."""
    known = list(dict.fromkeys(row["method"] for row in rows))
    if baseline is not None and baseline not in known:
        raise ValueError(f"expected a measured method as the baseline, one of {', '.join(known)}; got {baseline!r}")
    candidates = (baseline,) if baseline else BASELINES
    groups = arithmetic.grouped(rows, _conditions)
    order = sorted(groups, key=lambda key: (key[1] is not None, [*MODES, key[0]].index(key[0]), key[3] or 0))
    return [_comparison(key, groups, candidates, known) for key in order]


def _conditions(row: Row) -> tuple[Any, ...]:
    return row["mode"], row["study"], row["point"], row["batch"]


def _comparison(
    key: tuple[Any, ...], groups: dict[tuple[Any, ...], list[Row]], candidates: Iterable[str], known: list[str]
) -> Comparison:
    mode, study, point, batch = key
    by_method = _by_method(groups[key])
    # A study may measure its baseline once for all points, in rows without a point.
    measured = {**_by_method(groups.get((mode, study, None, batch), ())), **by_method}
    baseline = next((name for name in candidates if name in measured), None)
    results = [
        Result(
            method,
            rows[-1]["label"],
            arithmetic.finished(rows),
            [row for row in rows if row["failure"] is not None],
            arithmetic.paired(rows, measured[baseline] if baseline else ()),
            method == baseline,
        )
        for method, rows in by_method.items()
    ]
    results.sort(key=lambda result: (not result.is_baseline, known.index(result.method)))
    return Comparison(mode, study, point, batch or 1, results)


def _by_method(rows: Iterable[Row]) -> dict[str, list[Row]]:
    return arithmetic.grouped(rows, lambda row: row["method"])


def _parsed(file: Path) -> tuple[list[Row], list[str]]:
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
    return rows, notes


def _last_of_each(rows: Iterable[Row]) -> tuple[list[Row], int]:
    """Rows measured twice count once, the later one at the place of the first; and how many there were.

    In batches that is no mistake: what is left over by one size can be a whole batch of another.
    """
    found: dict[tuple[Any, ...], Row] = {}
    doubled = 0
    for row in rows:
        key = (*_conditions(row), row["method"], row["prompt"])
        doubled += key in found and row["mode"] != "batch"
        found[key] = row
    return list(found.values()), doubled
