"""Rows of GPU measurements: one measurement per line, of one machine and commit."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import torch

from token_recycling.bench.environment import environment

from .shapes import made

Row = dict[str, Any]


class Rows:
    """Rows of this machine and commit, in an append-only file."""

    def __init__(self, folder: Path, setting: Row) -> None:
        self.path, self.setting = folder / "rows.jsonl", setting
        folder.mkdir(parents=True, exist_ok=True)
        stored = [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.rows: list[Row] = [row for row in stored if row["setting"] == setting]

    def has(self, **key: Any) -> bool:
        return any(all(row[name] == value for name, value in key.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        self.rows.append({**row, "setting": self.setting})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")


def opened(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[Rows, Row]:
    """Return the rows of a folder measured on this machine and commit, and the conditions of new rows."""
    where = environment(made("tiny", 64, device, dtype), "llama shapes, random weights")
    names = ("accelerator", "cpu", "threads", "dtype", "torch", "transformers", "commit")
    return Rows(folder, {**{name: where[name] for name in names}, "system": platform.system()}), where
