"""The report: rows as tables, and whether the goals are met."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from token_recycling._util.files import replacing
from token_recycling.bench.tables import NONE, Table
from token_recycling.costs import best_size
from token_recycling.trees.templates import RANK_ACCEPTANCE, grow

from .measurements import ALONE, EVERYTHING
from .rows import Row, Rows
from .shapes import SHAPES

KINDS = ("eager", "captured", "compiled")
_DEEPEST = 64
MAT = 2.7
"""MAT of the paper's method on Spec-Bench, Vicuna 7B (Luo et al., 2408.08696)."""


@dataclass(frozen=True)
class Bar:
    """A goal for a 7B model on a GPU like an H200."""

    name: str
    wanted: str
    value: Callable[[Times], float]
    passes: Callable[[float], bool]


class Times:
    """Seconds of one shape at one context length, by (what, kind, nodes)."""

    def __init__(self, rows: list[Row]) -> None:
        self._seconds = {(row["what"], row["kind"], row["nodes"]): row["seconds"] for row in rows if "seconds" in row}

    def step(self, nodes: int) -> float:
        return self._seconds.get(("step", "captured", nodes), float("nan"))

    def other(self, kind: str, nodes: int) -> float:
        return self._seconds.get(("step", kind, nodes), float("nan"))

    def forward(self, nodes: int) -> float:
        return self._seconds.get(("forward", "captured", nodes), float("nan"))

    @property
    def generate(self) -> float:
        return self._seconds.get(("generate", "eager", 1), float("nan"))

    @property
    def compiled(self) -> float:
        return self._seconds.get(("generate", "compiled", 1), float("nan"))

    def overhead(self, nodes: int) -> float:
        """Return the fraction of a step's time outside the forward pass."""
        return 1 - self.forward(nodes) / self.step(nodes)

    def by_nodes(self) -> np.ndarray | None:
        """Return t(n) / t(1) of captured steps, (nodes,), with drafts padded to the next measured size; None if the
        step of one node is missing.
        """
        sizes = sorted(n for what, kind, n in self._seconds if (what, kind) == ("step", "captured"))
        if sizes[:1] != [1]:
            return None
        filled = np.searchsorted(sizes, np.arange(1, sizes[-1] + 1))
        return np.array([self.step(n) / self.step(1) for n in sizes])[filled]


BARS = (
    Bar("eager generate / plain step", ">= 4", lambda t: t.generate / t.step(1), lambda x: x >= 4),
    Bar("compiled generate / plain step", ">= 1", lambda t: t.compiled / t.step(1), lambda x: x >= 1),
    Bar("64-node step / plain step", "<= 1.15", lambda t: t.step(64) / t.step(1), lambda x: x <= 1.15),
    Bar("outside the forward pass, 64 nodes", "< 3%", lambda t: t.overhead(64), lambda x: x < 0.03),
    Bar(f"times fast plain at MAT {MAT}", ">= 2.3", lambda t: MAT * t.step(1) / t.step(64), lambda x: x >= 2.3),
    Bar(f"times eager generate at MAT {MAT}", ">= 9", lambda t: MAT * t.generate / t.step(64), lambda x: x >= 9),
)


KV_GOAL = 1.25
"""Maximum ratio of an accelerated call's keys and values to those of a plain call."""


def write_report(folder: Path, rows: Rows, where: Row, command: str) -> None:
    """Write report.md."""
    with replacing(folder / "report.md") as temporary:
        Path(temporary).write_text(page(rows.rows, where, command, list(SHAPES)))


def page(rows: list[Row], where: Row, command: str, order: list[str]) -> str:
    """Return the tables in Markdown, with shapes in `order`."""
    sizes = sorted({row["nodes"] for row in rows if row["what"] == "step"})
    by_place: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        by_place.setdefault((row["shape"], row["context"]), []).append(row)
    places = sorted(by_place, key=lambda place: (order.index(place[0]), place[1]))
    hardware = where["accelerator"] or f"no accelerator: {where['cpu']}, {where['threads']} threads"
    times = {place: Times(by_place[place]) for place in places}
    profiles = [row for row in rows if row["what"] == "profile" and "error" not in row]
    errors = [row for row in rows if "error" in row]
    pieces = [
        "# Captured passes on an accelerator",
        f"Written by `{command}`. {hardware}, {where['dtype']}, torch {where['torch']}, transformers "
        f"{where['transformers']}, commit {where['commit']}. Llama shapes with random weights; milliseconds, the best "
        "of several rounds; a step lasts from the draft on the host to the results on the host.",
        "## Goals",
        "The goals are set for the 7B shape on a GPU like an H200.",
        _table(
            [f"{bar.name} ({bar.wanted})" for bar in BARS],
            [[*place, *(judged(bar, times[place]) for bar in BARS)] for place in places],
        ),
        "## A step of n nodes",
        _table(
            ["eager generate", "compiled", *map(str, sizes), "the best tree"],
            [[*place, *_steps(times[place], sizes), _grown(times[place])] for place in places],
        ),
        "The best tree: the number of drafted nodes that gives the most tokens per second, if candidates are accepted "
        "as often as the shipped model's, and its speedup over plain steps.",
        "## Eager, captured and compiled steps",
        _table(
            [f"{kind} {nodes}" for nodes in EVERYTHING.compared for kind in KINDS],
            [
                [*place, *(_ms(times[place].other(kind, nodes)) for nodes in EVERYTHING.compared for kind in KINDS)]
                for place in places
            ],
        ),
        "## Forward pass",
        _table(
            [f"{nodes} nodes" for nodes in ALONE],
            [[*place, *(_ms(times[place].forward(nodes)) for nodes in ALONE)] for place in places],
        ),
        "## Device activity",
        "Milliseconds of one forward pass or step, from the first operation on the device to the last; the share of "
        "time in which the device waits for the host; the number of operations, and the longest ones in milliseconds.",
        _table(["kind", "nodes", "ms", "waits", "operations", "longest"], map(_profile, profiles)),
        *_whole_calls(rows),
        *(f"- {row['shape']}, {row['context']}, {row['kind']}, {row['nodes']} nodes: {row['error']}" for row in errors),
    ]
    return "\n\n".join(pieces) + "\n"


def _whole_calls(rows: list[Row]) -> Iterator[str]:
    """Yield the tables of `benchmarks.gpu.calls` for the measurements that have run."""
    measured = [row for row in rows if "error" not in row]
    if memory := [row for row in measured if row["what"] == "memory"]:
        yield "## Memory of a call"
        yield (
            "Peak allocation besides the weights; keys and values of a plain call, both in GiB; and the call's keys "
            "and values relative to those, if everything beyond the peak of `generate` is keys and values (goal: at "
            f"most {KV_GOAL})."
        )
        plain = {(row["shape"], row["context"]): row["bytes"] for row in memory if row["kind"] == "generate"}
        yield _table(["kind", "peak", "keys and values", "ratio"], [_memory(row, plain) for row in memory])
    if starts := [row for row in measured if row["what"] == "start"]:
        yield "## Time to first token, and time of `accelerate`"
        yield "Milliseconds to the first token of a later call; seconds of `accelerate` and of the first call."
        yield _table(
            ["kind", "first token", "accelerate", "first call"],
            [
                [*_key(row), _ms(row["seconds"]), f"{row['accelerate']:.2f}", f"{row['first_call']:.2f}"]
                for row in starts
            ],
        )
    experts = [row for row in measured if row["what"] == "experts" and "seconds" in row]
    if experts:
        yield "## Kernels of experts"
        yield "Milliseconds of a forward pass by number of rows, and the kernels of forward passes after the prompt."
        yield _table(["kind", "rows", "ms"], [[*_key(row), row["nodes"], _ms(row["seconds"])] for row in experts])
        yield from (
            f"- {row['shape']}: {name} runs {kernels}"
            for row in measured
            if "used" in row
            for name, kernels in row["used"].items()
        )


def _key(row: Row) -> list[Any]:
    return [row["shape"], row["context"], row["kind"]]


def _memory(row: Row, plain: dict[tuple[str, int], int]) -> list[Any]:
    sizes = [f"{size / 2**30:.2f}" for size in (row["bytes"], row["kv_bytes"])]
    base = plain.get((row["shape"], row["context"]))
    if not base or row["kind"] == "generate":
        return [*_key(row), *sizes, NONE]
    ratio = 1 + (row["bytes"] - base) / row["kv_bytes"]
    return [*_key(row), *sizes, f"{ratio:.2f} {'pass' if ratio <= KV_GOAL else 'FAIL'}"]


def _table(columns: list[str], rows: Iterable[list[Any]]) -> str:
    """Return a table whose first columns are shape and context, followed by `columns`."""
    cells = [[str(value) for value in row] for row in rows]
    return Table("", pd.DataFrame(cells, columns=["shape", "context", *columns])).markdown()


def _steps(times: Times, sizes: list[int]) -> list[str]:
    return [_ms(seconds) for seconds in (times.generate, times.compiled, *map(times.step, sizes))]


def _profile(row: Row) -> list[Any]:
    """Return the cells of a profile: time, share of waiting, operations, longest operations."""
    waits = f"{1 - row['busy'] / row['seconds']:.1%}"
    longest = ", ".join(f"{name} {_ms(seconds)}" for name, seconds in row["longest"][:4])
    place = [row["shape"], row["context"], row["kind"], row["nodes"]]
    return [*place, _ms(row["seconds"]), waits, row["operations"], longest]


def judged(bar: Bar, times: Times) -> str:
    """Return the measured value, and whether it meets the goal."""
    value = bar.value(times)
    if value != value:
        return NONE
    written = f"{value:.1%}" if "%" in bar.wanted else f"{value:.2f}"
    return f"{written} {'pass' if bar.passes(value) else 'FAIL'}"


def _ms(seconds: float) -> str:
    return NONE if seconds != seconds else f"{1e3 * seconds:.2f}"


def _grown(times: Times) -> str:
    by_nodes = times.by_nodes()
    if by_nodes is None or len(by_nodes) < 2:
        return NONE
    tree = grow(RANK_ACCEPTANCE, len(by_nodes) - 1, _DEEPEST)
    probabilities = [1.0]
    for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
        probabilities.append(probabilities[parent] * RANK_ACCEPTANCE[rank])
    nodes, rate = best_size(probabilities[1:], by_nodes)
    return f"{nodes} nodes, {rate:.2f}"
