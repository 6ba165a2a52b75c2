"""What a run decodes, in which order: workloads of items, each for every method, and notes on what is left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .data import BASELINE, COLD, REPLAY_BASELINE, Question, RunOptions
from .methods import DEFAULT, Method, parse
from .store import Key


@dataclass(frozen=True)
class Item:
    """Questions that are decoded together, with a row per method: one conversation, or a batch."""

    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        """Unique within a workload."""
        return "+".join(question.name for question in self.questions)

    @property
    def category(self) -> str:
        return self.questions[0].category


@dataclass(frozen=True)
class Workload:
    """Methods that decode the same items in the same order; each keeps what it learned from item to item."""

    mode: str
    specs: tuple[str, ...]
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...] = ()
    """Decoded first, unmeasured, by methods that learn."""

    def keys(self, item: Item) -> list[Key]:
        """Keys of an item's rows, in order."""
        return [(self.mode, spec, item.name) for spec in self.specs]


@dataclass
class BenchmarkPlan:
    """All workloads of a run, with notes on what is left out."""

    workloads: list[Workload] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def items(self) -> Iterator[tuple[Workload, Item]]:
        """Yield every item in order of measurement."""
        return ((workload, item) for workload in self.workloads for item in workload.items)

    def keys(self) -> list[list[Key]]:
        """Keys of the rows of every item."""
        return [workload.keys(item) for workload, item in self.items()]

    def calls(self, repeats: int, done: int = 0) -> int:
        """Return the number of measured calls after the first `done` items."""
        return repeats * sum(map(len, self.keys()[done:]))


def plan(options: RunOptions, questions: Sequence[Question]) -> BenchmarkPlan:
    """Return the workloads: batches, if any are given, else every method on every question, generated and replayed.

    The first `warm_up` questions of every category are not measured. Raises ValueError.
    """
    methods = [parse(spec) for spec in options.methods or DEFAULT]
    if options.batches:
        return _batches([method for method in methods if method.batches or options.methods], questions, options.batches)
    benchmark = BenchmarkPlan()
    if options.generate:
        numbers: Counter[str] = Counter()
        first: list[Item] = []
        measured: list[Item] = []
        for question in questions:
            (first if numbers[question.category] < options.warm_up else measured).append(Item((question,)))
            numbers[question.category] += 1
        if not measured:
            raise ValueError(f"warm_up must leave questions to measure, got {options.warm_up} of {len(questions)}")
        benchmark.workloads.append(Workload("generate", _with_baseline(methods), tuple(measured), tuple(first)))
    if not options.generate or (options.replay is not False and not options.temperature):
        _add_replay(benchmark, methods, questions)
    return benchmark


def _add_replay(benchmark: BenchmarkPlan, methods: Sequence[Method], questions: Sequence[Question]) -> None:
    """Add a replay: the methods that can, on the questions with a known answer."""
    replayable = [question for question in questions if question.form == "text" or question.references]
    specs: list[str] = []
    for method in methods:
        if method.replayed is not None and not method.forced:
            specs.append(f"{COLD * (method.cold and method.replayed != method.spec)}{method.replayed}")
        elif method.spec != BASELINE and not method.forced:
            benchmark.notes.append(f"{method.spec} decodes by itself and cannot replay a text: left out there")
    if missing := len(questions) - len(replayable):
        benchmark.notes.append(f"{missing} of {len(questions)} questions have no known answer and are not replayed")
    if REPLAY_BASELINE not in specs:
        specs.insert(0, REPLAY_BASELINE)
    if replayable:
        items = tuple(Item((question,)) for question in replayable)
        benchmark.workloads.append(Workload("replay", tuple(dict.fromkeys(specs)), items))


def _batches(methods: Sequence[Method], questions: Sequence[Question], sizes: Sequence[int]) -> BenchmarkPlan:
    """Plan a workload of batches for every size; a batch has one category."""
    able = [method for method in methods if method.batches]
    unable = [method.spec for method in methods if not method.batches]
    benchmark = BenchmarkPlan(notes=[f"{spec} decodes one text at a time: left out of batches" for spec in unable])
    if any(len(question.turns) > 1 for question in questions):
        benchmark.notes.append("of conversations only the first turn is decoded in batches")
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    for size in sizes:
        items = [
            Item(tuple(members[first : first + size]))
            for members in by_category.values()
            for first in range(0, len(members), size)
        ]
        benchmark.workloads.append(Workload("batch", _with_baseline(able), tuple(items)))
    return benchmark


def _with_baseline(methods: Sequence[Method]) -> tuple[str, ...]:
    """Add plain `generate` where it is missing: it is the reference of all outputs."""
    specs = [method.spec for method in methods]
    return tuple(specs if BASELINE in specs else [BASELINE, *specs])
