"""What a person sees while methods are measured: a bar, the method at work, and its tokens per second so far."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

from .._util.text_stream import one_line
from ..bench.run.measure import Event, calls
from ..bench.run.plan import BenchmarkPlan
from . import console


@contextmanager
def measuring(plan: BenchmarkPlan, repeats: int, done: int) -> Iterator[Callable[[Event], None]]:
    """A bar on standard error, if that is a terminal; the function it gives is called with every event. It also notes
    what fails early. `done` items of the plan are measured already.
    """
    total = calls(plan, repeats)
    tokens: dict[Any, int] = defaultdict(int)
    seconds: dict[Any, float] = defaultdict(float)
    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    measured = total - calls(plan, repeats, done)
    bar = console.progress_bar("", total, measured, columns, refresh_per_second=4)
    with bar as (progress, task):

        def on_event(event: Event) -> None:
            key = event.workload.mode, event.entry
            if event.found is None:
                rate = f", {tokens[key] / seconds[key]:.0f} tokens/s" if seconds[key] else ""
                phase = "" if event.phase == "measuring" else f" ({event.phase})"
                point = "" if event.entry.point is None else f" at {event.entry.point}"
                text = f"{event.workload.title}: {event.entry.method.label}{point}{rate}{phase}"
                progress.update(task, description=text)
            elif event.phase == "measuring":
                progress.advance(task)
                if not isinstance(event.found, Exception):
                    tokens[key] += sum(len(text) for outcome in event.found for text in outcome.tokens)
                    seconds[key] += sum(outcome.total_seconds for outcome in event.found)
            elif event.phase == "warming up" and isinstance(event.found, Exception):
                console.note(f"{event.entry.method.spec} fails: {one_line(event.found)}")

        yield on_event
