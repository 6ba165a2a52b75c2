"""The time to the first token and to the second: `generate` with a streamer, `stream` with the default and plain.

The first pass of our loop verifies a draft already, so that two tokens may come at once.
"""

from __future__ import annotations

from typing import Any

import torch

from token_recycling import Drafter, make_drafter, stream
from token_recycling._util.text_stream import StepRecorder
from token_recycling.bench.row_format import VERSION
from token_recycling.bench.run.items import Item
from token_recycling.bench.run.outcome import Stopwatch
from token_recycling.bench.run.plan import Entry, Workload
from token_recycling.bench.run.prompts import BenchmarkConfig

from .figures import PROCESSOR, WALL
from .scenarios import GENERATE


class Clock:
    """When the first token came and when the second, from its making on."""

    def __init__(self, device: torch.device) -> None:
        self._watch = Stopwatch(device)
        self._read: list[tuple[float, float]] = []

    def __call__(self, tokens: list[int]) -> None:
        """Tokens came."""
        self._read += [self._watch.read()] * len(tokens)

    def times(self) -> dict[str, list[float]]:
        """Of the first and the second token."""
        seconds, used = zip(*self._read[:2], strict=True)
        return {WALL: list(seconds), PROCESSOR: list(used)}


class FirstTokens:
    """A workload being measured; a drafter keeps what it learned from prompt to prompt."""

    def __init__(self, config: BenchmarkConfig, workload: Workload, environment: dict[str, Any]) -> None:
        self.config, self.workload, self.environment = config, workload, environment

    def prepare(self, done: int) -> None:
        """Warms up with the first texts and other drafters; then they learn from the first `done` items."""
        self._drafters = self._made()
        for item in self.workload.items[:3]:
            for entry in self.workload.entries:
                self._times(entry, item)
        self._drafters = self._made()
        for item in self.workload.items[:done]:
            for entry in self.workload.entries:
                if entry.method.remembers:
                    self._times(entry, item)

    def rows_of(self, index: int) -> list[dict[str, Any]]:
        """Measures the item of that number, the methods in an order that moves on; a row for each."""
        item, entries = self.workload.items[index], self.workload.entries
        first = index % len(entries)
        found = {entry: self._times(entry, item) for entry in (*entries[first:], *entries[:first])}
        return [
            {
                "version": VERSION,
                **dict(zip(("mode", "study", "point", "method", "prompt"), key, strict=True)),
                "label": entry.method.label,
                "category": item.category,
                "batch": item.size,
                "prompt_tokens": int(item.category),
                "tokens": self.config.max_new_tokens,
                **found[entry],
                "failure": None,
                "environment": self.environment,
            }
            for entry, key in zip(entries, self.workload.keys(item), strict=True)
        ]

    def _made(self) -> dict[str, Drafter]:
        specs = [entry.method.spec for entry in self.workload.entries]
        return {spec: make_drafter(spec) for spec in specs if spec != GENERATE}

    def _times(self, entry: Entry, item: Item) -> dict[str, list[float]]:
        model, tokens = self.config.model, self.config.max_new_tokens
        ids = self.config.ids(item.questions[0].turns[0])[None, : int(item.category)]
        clock = Clock(model.device)
        if entry.method.spec == GENERATE:
            recorder, mask = StepRecorder(clock), torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, streamer=recorder, max_new_tokens=tokens, do_sample=False)
        else:
            for step in stream(model, ids, self._drafters[entry.method.spec], max_new_tokens=tokens):
                clock(step.tokens)
        return clock.times()
