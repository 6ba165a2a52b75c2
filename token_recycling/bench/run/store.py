"""A folder of results: `rows.jsonl`, to which rows are only ever added, and `settings.json`, which says what they are.

An interrupted run resumes if everything is as it was: settings, data, model, machine and
versions. The rows of one item, a prompt or a batch, are written together when all its methods are measured; an item of
which only a part reached the disk is measured again. So rows are neither lost nor doubled nor mixed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..row_format import ROWS, SETTINGS
from .plan import BenchmarkPlan


def whole_items(folder: Path, settings: dict[str, Any], plan: BenchmarkPlan) -> int:
    """Return how many items of the plan have all their rows in the folder; raises ValueError for rows of another run.
    Changes nothing.
    """
    path = folder / ROWS
    if not path.exists() or not path.stat().st_size:
        return 0
    _compare(folder, folder / SETTINGS, settings)
    lines, items = path.read_bytes().count(b"\n"), 0
    for workload, _ in plan.items():
        lines -= len(workload.entries)
        if lines < 0:
            break
        items += 1
    return items


class Store:
    """The rows of one run."""

    def __init__(self, folder: Path, settings: dict[str, Any], plan: BenchmarkPlan, fresh: bool = False) -> None:
        """Open or create the folder; `fresh` deletes earlier rows.

        Raises ValueError for rows of another run.
        """
        self.path = folder / ROWS
        described = folder / SETTINGS
        folder.mkdir(parents=True, exist_ok=True)
        self.done = 0
        """Items with all their rows, in the order of the plan."""
        if self.path.exists() and self.path.stat().st_size and not fresh:
            _compare(folder, described, settings)
            self.done = self._keep_whole_items(plan)
            return
        self.path.write_text("", encoding="utf-8")
        described.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append the rows of one item, and wait until they are on the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.done += 1

    def _keep_whole_items(self, plan: BenchmarkPlan) -> int:
        """Cut off everything after the last complete item; return the number of complete items."""
        written = self.path.read_bytes()
        lines = written.split(b"\n")[:-1]  # text after the last line end was not written completely
        kept = items = 0
        for workload, item in plan.items():
            keys = workload.keys(item)
            found = lines[kept : kept + len(keys)]
            if len(found) < len(keys):
                break
            if [_key(line, self.path) for line in found] != keys:
                raise ValueError(f"rows in {self.path} are not in the order of this run; start with --fresh")
            kept, items = kept + len(keys), items + 1
        else:
            if kept < len(lines):
                raise ValueError(f"{self.path} must have {kept} rows, got {len(lines)}; start with --fresh")
        os.truncate(self.path, sum(len(line) + 1 for line in lines[:kept]))
        return items


def _compare(folder: Path, described: Path, settings: dict[str, Any]) -> None:
    if not described.is_file():
        raise ValueError(f"{folder} has rows without {SETTINGS}; give another folder or --fresh")
    try:
        there = json.loads(described.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{described} is not JSON: {error}; give another folder or --fresh") from None
    ours = json.loads(json.dumps(settings))
    different = [name for name in {**ours, **there} if ours.get(name) != there.get(name)]
    if different:
        listed = "; ".join(f"{name} {there.get(name)!r} there, {ours.get(name)!r} now" for name in different)
        raise ValueError(
            f"{folder} has rows of another run ({listed}); give another --output, or --fresh to measure again"
        )


def _key(line: bytes, path: Path) -> tuple[Any, ...]:
    try:
        row = json.loads(line)
        return tuple(row[name] for name in ("mode", "method", "prompt"))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a line that is no row, {line[:60]!r} ({error}); start with --fresh") from None
