"""Measuring: every entry of a workload on every item, in an order that rotates, repeated as often as configured.

What makes the figures honest:

- A warm-up on a text that is not measured, with drafters that are thrown away, pays for first calls.
- Every repetition has its own drafters. So in each of them an item meets a drafter that has seen the items before it,
  once each, and never the item itself; and all repetitions do the same work.
- The order of the entries moves on by one from repetition to repetition and from item to item, so that none always
  runs on a processor that another has warmed, or slowed.
- A failure is a row with the error.

Drafters first decode the warm-up items, and those that are done when an interrupted workload is resumed, unmeasured, to
learn what they had learned. Saving what a drafter learned would need to know every drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .data import Question
from .items import Item
from .plan import BenchmarkPlan, Entry, Workload
from .prompts import BenchmarkConfig
from .rows import Repetition, row
from .runners import Runner
from .store import Store

_WARM_UP = Question(
    "warm-up", "", ("The boat leaves at seven, and whoever is late waits for the next one. " * 20,), "text"
)
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Event:
    """A call before it is made, or after."""

    workload: Workload
    entry: Entry
    item: Item
    phase: str
    """`warming up`, `learning` or `measuring`."""
    found: Repetition | Exception | None = None
    """Result of the call; None before it."""


Hook = Callable[[Event], None]


def measure(
    config: BenchmarkConfig,
    plan: BenchmarkPlan,
    store: Store,
    environment: dict[str, Any],
    hook: Hook = lambda _: None,
) -> None:
    """Measure what is missing in `store`. `hook` is called before and after every call."""
    done = store.done
    for workload in plan.workloads:
        here = min(done, len(workload.items))
        done -= here
        if here < len(workload.items):
            run = WorkloadRun(config, workload, environment, hook)
            run.prepare(here)
            for index in range(here, len(workload.items)):
                store.append(run.rows_of(index))


def calls(plan: BenchmarkPlan, repeats: int, done: int = 0) -> int:
    """Return the number of measured calls from item `done` on."""
    return repeats * sum(len(workload.entries) for workload, _ in list(plan.items())[done:])


@dataclass
class WorkloadRun:
    """A workload while it is measured."""

    config: BenchmarkConfig
    workload: Workload
    environment: dict[str, Any]
    hook: Hook

    def prepare(self, done: int) -> None:
        """Warm up, and start runners that have learned from the first `done` items."""
        model, entries = self.config.model, self.workload.entries
        short = replace(self.config, max_new_tokens=min(_WARM_UP_TOKENS, self.config.max_new_tokens))
        item = self.workload.items[0]
        text = replace(item, questions=(_WARM_UP,) * item.size)
        for entry in entries:
            self._call(entry, entry.method.runner(model), 0, text, "warming up", short)
        self._runners = [[entry.method.runner(model) for _ in range(self.config.repeats)] for entry in entries]
        first = self.workload.warm_up
        for index, item in enumerate((*first, *self.workload.items[:done]), start=-len(first)):
            for entry, runners in zip(entries, self._runners, strict=True):
                if entry.method.remembers and not entry.cold:
                    for runner in runners:
                        self._call(entry, runner, index, item, "learning", self.config)

    def rows_of(self, index: int) -> list[dict[str, Any]]:
        """Measure one item; return a row per entry."""
        entries, item = self.workload.entries, self.workload.items[index]
        found: dict[Entry, list[Repetition | Exception]] = {entry: [] for entry in entries}
        for repetition in range(self.config.repeats):
            first = (index + repetition) % len(entries)
            for place in (*range(first, len(entries)), *range(first)):
                entry = entries[place]
                runner = entry.method.runner(self.config.model) if entry.cold else self._runners[place][repetition]
                found[entry].append(self._call(entry, runner, index, item, "measuring", self.config))
        rows = []
        plain = self.workload.baseline
        wanted = None if plain is None else found[plain][0]
        for entry in entries:
            rows.append(row(self.config, self.workload, entry, item, found[entry], wanted, self.environment))
        return rows

    def _call(
        self, entry: Entry, runner: Runner, index: int, item: Item, phase: str, config: BenchmarkConfig
    ) -> Repetition | Exception:
        self.hook(Event(self.workload, entry, item, phase))
        if entry.temperature:
            torch.manual_seed(self.config.seed + index)
        try:
            found: Repetition | Exception = item.run(config, runner, entry.sampling)
        except Exception as error:  # an error of the method or the prompt is a failure in the row
            found = error
        self.hook(Event(self.workload, entry, item, phase, found))
        return found
