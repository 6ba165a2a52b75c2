"""What a person sees while methods are measured: a bar, the method at work, and its tokens per second so far."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from ..bench.run.measure import Event, calls
from ..bench.run.plan import BenchmarkPlan
from ..text_stream import one_line
from . import console


class Measuring:
    """Is called with every event; shows a bar on standard error if that is a terminal, and notes what failed early."""

    def __init__(self, plan: BenchmarkPlan, repeats: int, done: int) -> None:
        """`done` items of the plan are measured already."""
        self._total, self._done = calls(plan, repeats), calls(plan, repeats) - calls(plan, repeats, done)
        self._tokens: dict[Any, int] = defaultdict(int)
        self._seconds: dict[Any, float] = defaultdict(float)
        self._progress: Progress | None = None
        self._open = ExitStack()

    def __enter__(self) -> Measuring:
        if sys.stderr.isatty():
            columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._progress = console.transient_progress(*columns, refresh_per_second=4)
            self._open.enter_context(self._progress)
            self._task = self._progress.add_task("", total=self._total, completed=self._done)
        return self

    def __exit__(self, *_: Any) -> None:
        self._open.close()

    def __call__(self, event: Event) -> None:
        """A call begins or has ended."""
        if event.found is None:
            self._show(event)
            return
        if event.phase == "warming up" and isinstance(event.found, Exception):
            console.note(f"{event.entry.method.spec} fails: {one_line(event.found)}")
        if event.phase == "measuring":
            self._done += 1
            if not isinstance(event.found, Exception):
                key = event.workload.mode, event.entry
                self._tokens[key] += sum(len(text) for outcome in event.found for text in outcome.tokens)
                self._seconds[key] += sum(outcome.total_seconds for outcome in event.found)

    def _show(self, event: Event) -> None:
        if self._progress is None:
            return
        key = event.workload.mode, event.entry
        rate = f", {self._tokens[key] / self._seconds[key]:.0f} tokens/s" if self._seconds[key] else ""
        phase = "" if event.phase == "measuring" else f" ({event.phase})"
        point = "" if event.entry.point is None else f" at {event.entry.point}"
        text = f"{event.workload.title}: {event.entry.method.label}{point}{rate}{phase}"
        self._progress.update(self._task, description=text, completed=self._done)
