"""The arithmetic of a report: what rows of measurements say, as plain functions.

A row is one line of `rows.jsonl`: one method on one prompt; docs/benchmark.md lists its keys and states every formula
below. Tokens, steps and seconds are summed over rows before they are divided, so that a long text counts for more than
a short one. Rows of failed runs hold no measurements: pass rows through `finished` first. A figure that the
rows do not give is None, never zero.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)
Row = dict[str, Any]
Pair = tuple[Row, Row]
"""Rows of a method and of the baseline on the same prompt."""

DECODE = "seconds"
"""Clock of the steps alone, the prompt's forward pass left out."""
CALL = "total_seconds"
"""Clock of the whole call, the prompt's forward pass included."""


class Spread(NamedTuple):
    """A distribution of values: least, quartiles, most."""

    least: float
    lower: float
    median: float
    upper: float
    most: float


class NodeAcceptance(NamedTuple):
    """How often nodes at one place in the tree could be accepted, and were."""

    tried: int
    """Nodes whose parent was accepted."""
    accepted: int

    @property
    def share(self) -> float:
        """Accepted nodes as a share of those whose parent was."""
        return self.accepted / self.tried if self.tried else 0.0


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Items by what `key` says of them, in order."""
    found: dict[_Key, list[_Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def finished(rows: Iterable[Row]) -> list[Row]:
    """Rows without a failure."""
    return [row for row in rows if row["failure"] is None]


def _with(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Rows in which all of these were measured."""
    return [row for row in rows if all(row[key] is not None for key in keys)]


def _total(rows: Iterable[Row], key: str) -> float:
    return sum(row[key] for row in rows)


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _share(above: str, below: str) -> Callable[[Sequence[Row]], float | None]:
    """The sum of one key by that of another, over the rows that have both."""

    def share(rows: Sequence[Row]) -> float | None:
        known = _with(rows, above, below)
        return _ratio(_total(known, above), _total(known, below))

    return share


mat = _share("tokens", "steps")
"""Mean accepted tokens: all tokens by all steps, the target's own token of a step included."""
discard_rate = _share("discarded", "tokens")
"""Drafted tokens that were not accepted, per emitted token."""
verification_rate = _share("steps", "tokens")
"""Steps, which are forward passes of the target, per emitted token."""


def mat_without_loops(rows: Sequence[Row]) -> float | None:
    """MAT outside looping stretches of the output."""
    known = _with(rows, "steps", "loop_tokens", "loop_steps")
    tokens = _total(known, "tokens") - _total(known, "loop_tokens")
    return _ratio(tokens, _total(known, "steps") - _total(known, "loop_steps"))


def repeated_4grams(rows: Sequence[Row]) -> float | None:
    """Share of 4-grams that stood in the same output before, weighted by the outputs' tokens."""
    known = _with(rows, "repeated_4grams")
    return _ratio(sum(row["repeated_4grams"] * row["tokens"] for row in known), _total(known, "tokens"))


def answered(row: Row) -> bool:
    """Whether any text went beyond its first token, which comes from the prompt's forward pass: else nothing was
    decoded, and there is no speed.
    """
    return bool(row["tokens"] > (row.get("batch") or 1))


def tokens_per_second(rows: Sequence[Row], clock: str = DECODE) -> float | None:
    """All tokens by the sum of the rows' times, of each the median of its repetitions; rows that say something only."""
    rows = [row for row in rows if answered(row)]
    return _ratio(_total(rows, "tokens"), sum(statistics.median(row[clock]) for row in rows))


def paired(rows: Iterable[Row], baseline: Iterable[Row]) -> list[Pair]:
    """The prompts that both finished and answered, each with its two rows."""
    others = {row["prompt"]: row for row in finished(baseline) if answered(row)}
    return [(row, others[row["prompt"]]) for row in finished(rows) if answered(row) and row["prompt"] in others]


def speedup(pairs: Sequence[Pair]) -> float | None:
    """The baseline's seconds per token by the method's, of whole calls, over all pairs together.

    Where both gave the same number of tokens, as identical output does, this is the ratio of the summed times.
    """
    ours, theirs = (tokens_per_second([pair[place] for pair in pairs], CALL) for place in (0, 1))
    return None if ours is None or theirs is None else _ratio(ours, theirs)


def speedups(pairs: Iterable[Pair]) -> list[float]:
    """The speedup of each pair."""
    return [value for pair in pairs if (value := speedup([pair])) is not None]


def resampled(pairs: Sequence[Pair], draws: int = 2000) -> np.ndarray:
    """(draws,): the speedup over prompts drawn anew, with replacement; methods with equal prompts have equal draws."""
    ordered = sorted(pairs, key=lambda pair: pair[0]["prompt"])
    figures = np.array([[(each["tokens"], statistics.median(each[CALL])) for each in pair] for pair in ordered])
    drawn = np.random.default_rng(0).integers(len(ordered), size=(draws, len(ordered)))
    (tokens, seconds), (their_tokens, their_seconds) = np.moveaxis(figures[drawn].sum(axis=1), 0, -1)
    return tokens / seconds * their_seconds / their_tokens


def interval(pairs: Sequence[Pair]) -> tuple[float, float] | None:
    """The middle 95% of the speedups over prompts drawn anew; None for one prompt, of which nothing is known."""
    if len(pairs) < 2:
        return None
    low, high = np.quantile(resampled(pairs), (0.025, 0.975))
    return float(low), float(high)


def spread(values: Sequence[float]) -> Spread | None:
    """Least, quartiles and most, the quartiles interpolated between the sorted values."""
    if not values:
        return None
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return Spread(min(values), quartiles[0], quartiles[1], quartiles[2], max(values))


def repeat_spread(rows: Iterable[Row]) -> float | None:
    """How far repetitions of one prompt lie apart: slowest less fastest by the median, the median of all rows."""
    repeated = [row[CALL] for row in rows if len(row[CALL]) > 1 and statistics.median(row[CALL])]
    apart = [(max(times) - min(times)) / statistics.median(times) for times in repeated]
    return statistics.median(apart) if apart else None


def part_seconds(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds per step of each part: the parts' sums by the steps of the rows that have them."""
    timed = [row for row in rows if row["parts"]]
    steps, sums = _total(timed, "steps"), Counter[str]()
    for row in timed:
        sums.update(row["parts"])
    return {part: value / steps for part, value in sums.items()} if steps else {}


def overhead(parts: dict[str, float]) -> float | None:
    """Time outside the model's forward pass, as a share of the forward pass."""
    forward = parts.get("forward", 0.0)
    return _ratio(sum(parts.values()) - forward, forward)


def lengths(rows: Iterable[Row]) -> dict[int, float]:
    """Share of the steps by the number of tokens they gave."""
    counts = _counted(rows, "lengths")
    return {length: steps / counts.total() for length, steps in sorted(counts.items())}


def mean_nodes(rows: Iterable[Row]) -> float | None:
    """Mean nodes of a step's tree, the root included."""
    counts = _counted(rows, "nodes")
    return _ratio(sum(nodes * steps for nodes, steps in counts.items()), counts.total())


def by_place(rows: Iterable[Row]) -> dict[tuple[int, int], NodeAcceptance]:
    """Tried and accepted nodes by depth and rank."""
    tried, accepted = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for row in rows:
        for counts, key in ((tried, "tried"), (accepted, "accepted")):
            for depth, rank, count in row[key] or ():
                counts[depth, rank] += count
    return {place: NodeAcceptance(tried[place], accepted[place]) for place in sorted(tried)}


def by_path(rows: Iterable[Row]) -> dict[tuple[int, ...], NodeAcceptance]:
    """Tried and accepted nodes by rank path, where rows have them."""
    tried, accepted = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    for row in rows:
        for path, *counts in row.get("paths") or ():
            ranks = tuple(map(int, path.split(".")))
            tried[ranks] += counts[0]
            accepted[ranks] += counts[1]
    order = sorted(tried, key=lambda path: (len(path), path))
    return {path: NodeAcceptance(tried[path], accepted[path]) for path in order}


def compared(rows: Iterable[Row]) -> list[Row]:
    """Rows whose output was compared with plain decoding's."""
    return _with(rows, "identical")


def divergences(rows: Iterable[Row]) -> list[Row]:
    """Rows whose output differs, the largest margin first."""
    differing = [row for row in rows if row["identical"] is False]
    return sorted(differing, key=lambda row: -margin(row))


def margin(row: Row) -> float:
    """Difference of the two logits at a row's first divergence; infinite where it is not known."""
    found = row["divergence"]
    return float("inf") if not found or found["margin"] is None else abs(found["margin"])


def _counted(rows: Iterable[Row], key: str) -> Counter[int]:
    counts = Counter[int]()
    for row in rows:
        counts.update({int(value): count for value, count in (row[key] or {}).items()})
    return counts
