"""A folder of results: `rows.jsonl`, to which rows are only appended, and `settings.json`, which describes them.

An interrupted run can resume if settings, data, model, machine and versions are unchanged. The rows of one item (a
prompt or a batch) are written together when all its methods are measured; an item that reached the disk only partially
is measured again. So rows are neither lost, duplicated nor mixed.

Keys of a row; those that do not apply are null:

- `mode`: `generate`, `replay` or `batch`
- `method`, `label`, `prompt`, `category`, `batch`: method as given, display name, unique prompt name, task, batch
  size
- `prompt_tokens`, `tokens`, `first_tokens`, `steps`, `mat`: over all turns, or all sequences of a batch
- `loop_tokens`, `loop_steps`, `repeated_4grams`: tokens and steps in loops; share of 4-grams that occurred before
- `seconds`, `prefill_seconds`, `total_seconds`, `processor_seconds`: decoding, prefill, whole call, processor time;
  one per repeat
- `turns`, `last_prefill_seconds`: turns of a conversation; time to first token of the last turn, one per repeat
- `parts`, `drafted`, `discarded`: seconds by part of a step; drafted tokens; discarded tokens
- `lengths`, `nodes`: histograms of steps by emitted tokens, and by tree nodes with the root
- `tried`, `accepted`: `[depth, rank, count]`: nodes whose parent was accepted, and accepted nodes
- `identical`, `divergence`: `turn`, `place`, `expected` and `got` token, `margin` of their logits
- `failure`, `temperature`, `max_new_tokens`, `seed`, `environment`: error, settings, machine, versions, model, dtype,
  commit
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .methods import Outcome

    Repetition = list[Outcome]

Row = dict[str, Any]
"""One line of `rows.jsonl`: one method on one prompt."""
Key = tuple[str, str, str]
"""Mode, method and prompt of a row."""
VERSION = 1
"""Format version of rows."""
ROWS, SETTINGS = "rows.jsonl", "settings.json"
"""File names within a folder."""
MODES = ("generate", "replay", "batch")
"""Modes in the order of a report."""
CLOCKS = {"wall": ("seconds", "total_seconds"), "processor": ("processor_seconds", "processor_seconds")}
"""Keys of decoding time and whole-call time for each clock; processor time is known only for whole calls."""


class Store:
    """The rows of one run."""

    def __init__(self, folder: Path, settings: dict[str, Any], items: Sequence[Sequence[Key]]) -> None:
        """Check the folder without changing it; `items` are the row keys of every item in order of measurement. Raises
        ValueError for rows of another run.
        """
        self.path, self._described, self._settings = folder / ROWS, folder / SETTINGS, settings
        self.done = 0
        """Number of items with all their rows."""
        self._bytes = 0
        if self.path.exists() and self.path.stat().st_size:
            self._compare()
            self._count(items)

    def open(self) -> None:
        """Create the folder, and truncate the rows after the last complete item."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._bytes)
        self._described.write_text(json.dumps(self._settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    def append(self, rows: Sequence[Row]) -> None:
        """Append the rows of one item, and wait until they are on disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.done += 1

    def _compare(self) -> None:
        folder = self.path.parent
        if not self._described.is_file():
            raise ValueError(f"{folder} has rows without {SETTINGS}; give another --output or --fresh")
        try:
            stored = json.loads(self._described.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self._described} is not JSON: {error}; give another --output or --fresh") from None
        ours = json.loads(json.dumps(self._settings))
        different = [name for name in {**ours, **stored} if ours.get(name) != stored.get(name)]
        if different:
            listed = "; ".join(f"{name} {stored.get(name)!r} there, {ours.get(name)!r} now" for name in different)
            raise ValueError(
                f"{folder} has rows of another run ({listed}); give another --output, or --fresh to measure again"
            )

    def _count(self, items: Sequence[Sequence[Key]]) -> None:
        lines = self.path.read_bytes().split(b"\n")[:-1]  # a line without an end was not written completely
        complete = 0
        for keys in items:
            rows = lines[complete : complete + len(keys)]
            if len(rows) < len(keys):
                break
            if [self._key(line) for line in rows] != list(keys):
                raise ValueError(f"rows in {self.path} are not in the order of this run; start with --fresh")
            complete, self.done = complete + len(keys), self.done + 1
        if self.done == len(items) and complete < len(lines):
            raise ValueError(f"{self.path} must have {complete} rows, got {len(lines)}; start with --fresh")
        self._bytes = sum(len(line) + 1 for line in lines[:complete])

    def _key(self, line: bytes) -> Key:
        try:
            row = json.loads(line)
            return row["mode"], row["method"], row["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.path} has a line that is not a row, {line[:60]!r} ({error}); start with --fresh"
            ) from None


def delete_rows(folder: Path) -> None:
    """Delete the rows of an earlier run in a folder."""
    for name in (ROWS, SETTINGS):
        (folder / name).unlink(missing_ok=True)


# Contents of a row

_CLOCKS = ("seconds", "prefill_seconds", "total_seconds", "processor_seconds")
_MEASUREMENTS = (
    *("prompt_tokens", "tokens", "first_tokens", "steps", "mat", "loop_tokens", "loop_steps", "repeated_4grams"),
    *(*_CLOCKS, "turns", "last_prefill_seconds", "parts", "drafted", "discarded"),
    *("lengths", "nodes", "tried", "accepted", "identical", "divergence"),
)


def row(
    conditions: Row, repetitions: Sequence[Repetition | Exception], divergences: Sequence[dict[str, Any] | None] | None
) -> Row:
    """Return the row for all repetitions and turns of an item; `conditions` are the keys independent of the outcome.

    Counts come from the repetition with the median time. `divergences` are the divergences of the repetitions from the
    baseline, or None if there is nothing to compare with.
    """
    failure = next((result for result in repetitions if isinstance(result, Exception)), None)
    written: Row = {
        "version": VERSION,
        **conditions,
        **dict.fromkeys(_MEASUREMENTS),
        "failure": None if failure is None else f"{type(failure).__name__}: {' '.join(str(failure).split())}",
    }
    finished = [result for result in repetitions if not isinstance(result, Exception)]
    if failure is None:
        written.update(_measured(finished))
        if divergences is not None:
            divergence = next(filter(None, divergences), None)
            written.update(identical=divergence is None, divergence=divergence)
    return written


def _measured(repetitions: Sequence[Repetition]) -> dict[str, Any]:
    median = sorted(repetitions, key=lambda one: _summed(one, "total_seconds"))[(len(repetitions) - 1) // 2]
    texts = [text for outcome in median for text in outcome.tokens]
    tokens, steps = sum(map(len, texts)), sum(outcome.steps for outcome in median)
    return {
        "prompt_tokens": sum(len(prompt) for outcome in median for prompt in outcome.prompts),
        "tokens": tokens,
        "first_tokens": sum(outcome.first_tokens for outcome in median),
        "steps": steps,
        "mat": tokens / steps,
        **_loops(median),
        "repeated_4grams": repeated_4grams(texts),
        **{clock: [_summed(repetition, clock) for repetition in repetitions] for clock in _CLOCKS},
        "turns": len(median),
        "last_prefill_seconds": [repetition[-1].prefill_seconds for repetition in repetitions],
        **_drafting(median),
    }


def _summed(repetition: Repetition, clock: str) -> float:
    return sum(getattr(outcome, clock) for outcome in repetition)


def _loops(repetition: Repetition) -> dict[str, int]:
    """Return loop counts; none for batches, where the tokens of a step are unknown."""
    counts = [in_loops(outcome.tokens[0], outcome.lengths) for outcome in repetition if outcome.lengths is not None]
    if len(counts) < len(repetition):
        return {}
    return {"loop_tokens": sum(tokens for tokens, _ in counts), "loop_steps": sum(steps for _, steps in counts)}


def _drafting(repetition: Repetition) -> dict[str, Any]:
    """Return counts of our own loop; for other decoding only the lengths of steps."""
    counted = [outcome.stats for outcome in repetition if outcome.stats is not None]
    if not counted:
        lengths = Counter(length for outcome in repetition for length in outcome.lengths or ())
        return {"lengths": _by_number(lengths) or None}
    stats = reduce(add, counted)
    return {
        "parts": stats.seconds,
        "drafted": stats.drafted,
        "discarded": stats.discarded,
        "lengths": _by_number(stats.lengths),
        "nodes": _by_number(stats.nodes),
        "tried": [[*key, count] for key, count in sorted(stats.tried.items())],
        "accepted": [[*key, count] for key, count in sorted(stats.accepted.items())],
    }


def _by_number(counts: Counter[int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(counts.items())}


# Small models decoded greedily tend to repeat a line or a phrase. Such loops favor every method that drafts copies, so
# they are counted. A looping passage repeats exactly with a fixed period; its first period is text, the others are
# loop. Repeated 4-grams also count near repetition, as in ordinary code and prose.

LONGEST_PERIOD = 64
ROUNDS = 3
SHORTEST_STRETCH = 12
"""Minimum number of tokens of a looping passage."""


def repeated_4grams(outputs: Sequence[Sequence[int]]) -> float | None:
    """Return the share of 4-grams that occurred before in the same output; None if all outputs are too short."""
    total = repeated = 0
    for output in outputs:
        grams = list(zip(output, output[1:], output[2:], output[3:], strict=False))
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else None


def looping(tokens: Sequence[int]) -> list[bool]:
    """Return for each token whether it lies in a looping passage, after its first period."""
    text, loops = np.asarray(tokens), np.zeros(len(tokens), dtype=bool)
    for period in range(1, min(LONGEST_PERIOD, len(text) // ROUNDS) + 1):
        same = np.concatenate([[False], text[period:] == text[:-period], [False]])
        borders = np.flatnonzero(same[1:] != same[:-1])
        for first, last in zip(borders[::2], borders[1::2], strict=True):
            # Tokens from first + period up to last + period (exclusive) equal those one period earlier.
            if last - first + period >= max(ROUNDS * period, SHORTEST_STRETCH):
                loops[first + period : last + period] = True
    return loops.tolist()


def in_loops(tokens: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return tokens and steps of all steps with at least half of their tokens in looping passages.

    `lengths` are the numbers of tokens of every step, in order. Whole steps are counted, so that the MAT of the others
    is defined.
    """
    assert sum(lengths) == len(tokens)
    loops, start, loop_tokens, loop_steps = looping(tokens), 0, 0, 0
    for length in lengths:
        if 2 * sum(loops[start : start + length]) >= length:
            loop_tokens += length
            loop_steps += 1
        start += length
    return loop_tokens, loop_steps
