"""What is run in which order: workloads, and the entries of each.

In one workload all entries decode the same items in the same order, and an entry keeps what it learned from item to
item (*hot start*) unless it is a cold one. The main comparison is a workload of generation and one of replay; batches
are further ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..row_format import BASELINE, REPLAY_BASELINE
from .data import Question
from .items import Batch, Conversation, Item, ReplayedConversation
from .methods import Drafted, Method, parse


@dataclass(frozen=True)
class Entry:
    """A method with its sampling."""

    method: Method
    cold: bool = False
    """Whether it forgets everything after every prompt."""
    temperature: float = 0.0

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`: greedy, or sampling from all tokens, where transformers' default would be the top
        50. The model's own configuration is not used (`session.without_own_choices`).
        """
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True)
class Workload:
    """Entries that decode the same items in the same order."""

    mode: str
    entries: tuple[Entry, ...]
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...] = ()
    """Decoded first, unmeasured, by methods that learn."""

    @property
    def baseline(self) -> Entry | None:
        """Plain decoding, whose output the others' must equal."""
        return next((one for one in self.entries if one.method.spec == BASELINE), None)

    def keys(self, item: Item) -> list[tuple[Any, ...]]:
        """Keys of an item's rows, in order."""
        return [(self.mode, one.method.spec, item.name) for one in self.entries]


@dataclass
class BenchmarkPlan:
    """All workloads of a run, with notes on what is left out."""

    workloads: list[Workload] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: BenchmarkPlan) -> None:
        """Append another plan's workloads and notes."""
        self.workloads += other.workloads
        self.notes += [note for note in other.notes if note not in self.notes]

    def items(self) -> Iterator[tuple[Workload, Item]]:
        """Yield every item in order of measurement."""
        return ((workload, item) for workload in self.workloads for item in workload.items)


def comparison(
    entries: Sequence[Entry], questions: Sequence[Question], replay: bool, warm_up: int = 0
) -> BenchmarkPlan:
    """Plan every entry on every question, generated and, if wanted, replayed. The first `warm_up` questions of every
    category are not measured.
    """
    seen: Counter[str] = Counter()
    first: list[Item] = []
    measured: list[Item] = []
    for question in questions:
        (first if seen[question.category] < warm_up else measured).append(Conversation((question,)))
        seen[question.category] += 1
    if not measured:
        raise ValueError(f"warm_up must leave questions to measure, got {warm_up} of {len(questions)}")
    plan = BenchmarkPlan([Workload("generate", _with_baseline(entries), tuple(measured), tuple(first))])
    if replay:
        plan.add(replays(entries, questions))
    return plan


def replays(entries: Sequence[Entry], questions: Sequence[Question]) -> BenchmarkPlan:
    """Plan a replay: the methods that can, on the questions with a known answer."""
    plan = BenchmarkPlan()
    known = [question for question in questions if question.form == "text" or question.references]
    kept: dict[str, Entry] = {}
    for one in entries:
        method = one.method.in_replay()
        if method is not None:
            kept.setdefault(method.spec, Entry(method, one.cold))
        elif one.method.spec != BASELINE:
            plan.notes.append(f"{one.method.spec} decodes by itself and cannot replay a text: left out there")
    if len(known) < len(questions):
        missing = len(questions) - len(known)
        plan.notes.append(f"{missing} of {len(questions)} questions have no known answer and are not replayed")
    if REPLAY_BASELINE not in kept:
        kept = {REPLAY_BASELINE: Entry(Drafted(REPLAY_BASELINE)), **kept}
    if known:
        items = tuple(ReplayedConversation((question,)) for question in known)
        plan.workloads.append(Workload("replay", tuple(kept.values()), items))
    return plan


def batches(methods: Sequence[Method], questions: Sequence[Question], sizes: Sequence[int]) -> BenchmarkPlan:
    """Plan a workload of batches for every size; a batch has one category."""
    able = [Entry(method) for method in methods if method.batches]
    unable = [method.spec for method in methods if not method.batches]
    plan = BenchmarkPlan(notes=[f"{spec} decodes one text at a time: left out of batches" for spec in unable])
    if any(len(question.turns) > 1 for question in questions):
        plan.notes.append("of conversations only the first turn is decoded in batches")
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    for size in sizes:
        items = []
        for members in by_category.values():
            items += [Batch(tuple(members[place : place + size])) for place in range(0, len(members), size)]
        plan.workloads.append(Workload("batch", _with_baseline(able), tuple(items)))
    return plan


def _with_baseline(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """Add plain `generate` to the entries where it is missing: it is the reference of all outputs."""
    if any(one.method.spec == BASELINE for one in entries):
        return tuple(entries)
    return (Entry(parse(BASELINE)), *entries)
