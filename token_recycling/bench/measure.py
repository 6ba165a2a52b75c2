"""Measure methods on the same items: every method on every item, in rotating order, repeated as configured.

Measures for fair figures:

- A warm-up on text that is not measured, with methods that are discarded, absorbs the cost of first calls.
- Every repetition has its own methods. So in each repetition, the drafter has seen every earlier item once and never
  the current item, and all repetitions do the same work.
- The order of the methods rotates by one between repetitions and between items, so that no method always runs on a
  processor that another has warmed up or throttled. If methods decode the tokens of `generate`, `generate` runs first.
- A failure becomes a row with the error.

Methods first decode the warm-up items, without being measured. When an interrupted workload is resumed, they also
decode the finished items, to learn the same state again; saving learned state would need code for every drafter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .data import BASELINE, COLD, REPLAY_BASELINE, Question, RunOptions
from .methods import DEFAULT, Call, Method, Outcome, parse
from .prompts import BenchmarkConfig, prompt, replayed
from .store import Key, Row, Store, row

Repetition = list[Outcome]
"""One decoding of an item: an outcome per turn."""


# Plan: workloads of items, each for every method, and notes on omissions


@dataclass(frozen=True)
class Item:
    """Questions decoded together, with one row per method: one conversation, or a batch."""

    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        """Name, unique within a workload."""
        return "+".join(question.name for question in self.questions)

    @property
    def category(self) -> str:
        return self.questions[0].category


@dataclass(frozen=True)
class Workload:
    """Methods that decode the same items in the same order; each keeps its learned state from item to item."""

    mode: str
    specs: tuple[str, ...]
    items: tuple[Item, ...]
    warm_up: tuple[Item, ...] = ()
    """Items decoded first, without being measured, by methods that learn."""

    def keys(self, item: Item) -> list[Key]:
        """Return the keys of an item's rows, in order."""
        return [(self.mode, spec, item.name) for spec in self.specs]


@dataclass
class BenchmarkPlan:
    """All workloads of a run, with notes on omissions."""

    workloads: list[Workload] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def items(self) -> Iterator[tuple[Workload, Item]]:
        """Yield every item in order of measurement."""
        return ((workload, item) for workload in self.workloads for item in workload.items)

    def keys(self) -> list[list[Key]]:
        """Return the keys of the rows of every item."""
        return [workload.keys(item) for workload, item in self.items()]

    def calls(self, repeats: int, done: int = 0) -> int:
        """Return the number of measured calls after the first `done` items."""
        return repeats * sum(map(len, self.keys()[done:]))


def plan(options: RunOptions, questions: Sequence[Question]) -> BenchmarkPlan:
    """Return the workloads: batches, if options have any, else every method on every question, generated and replayed.

    The first `warm_up` questions of every category are not measured. Raises ValueError if none are left.
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
    """Add a replay: methods that can replay, on questions with a known answer."""
    replayable = [question for question in questions if question.form == "text" or question.references]
    specs: list[str] = []
    for method in methods:
        if method.replayed is not None and not method.forced:
            specs.append(f"{COLD * (method.cold and method.replayed != method.spec)}{method.replayed}")
        elif method.spec != BASELINE and not method.forced:
            benchmark.notes.append(f"{method.spec} cannot replay reference text: excluded from replay")
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
    benchmark = BenchmarkPlan(notes=[f"{spec} decodes one sequence at a time: no batches measured" for spec in unable])
    if any(len(question.turns) > 1 for question in questions):
        benchmark.notes.append("batches contain only the first turn of conversations")
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
    """Return the specs of methods, with `generate` first if it is missing: it is the reference of all outputs."""
    specs = [method.spec for method in methods]
    return tuple(specs if BASELINE in specs else [BASELINE, *specs])


# Decoding an item


def decode_item(
    config: BenchmarkConfig, mode: str, method: Method, item: Item, texts: Sequence[Sequence[int]] | None = None
) -> Repetition:
    """Call the method once per turn; raises errors of the method or the prompt. `texts` are the tokens that a forced
    method decodes, by turn.
    """
    if mode == "batch":
        prompts = [prompt(config, question) for question in item.questions]
        remaining = min(remaining for _, remaining in prompts)
        return [method.decode(config.model, Call(config.arguments([ids for ids, _ in prompts], remaining)))]
    (question,) = item.questions
    if mode == "replay":
        return [
            method.decode(config.model, Call(config.arguments([ids], len(answer)), answer))
            for ids, answer in replayed(config, question)
        ]
    return _conversation(config, method, question, texts)


def _conversation(
    config: BenchmarkConfig, method: Method, question: Question, texts: Sequence[Sequence[int]] | None
) -> Repetition:
    """Decode the turns of a question one after another; earlier turns have the method's own answers."""
    answers: list[str] = []
    outcomes = []
    prediction = None if question.prediction is None else config.ids(question.prediction, special=False)
    hints = method.hints(config.model, prediction, len(question.turns))
    for turn in range(len(question.turns)):
        ids, remaining = prompt(config, question, answers)
        arguments = config.arguments([ids], remaining)
        if question.grammar is not None:
            arguments["logits_processor"] = [_processor(config, *question.grammar)]
        reference = None if texts is None else torch.tensor(texts[turn])
        outcomes.append(method.decode(config.model, Call(arguments, reference, hints)))
        answers.append(config.decoded(outcomes[-1].tokens[0]))
    return outcomes


def _processor(config: BenchmarkConfig, kind: str, text: str) -> transformers.LogitsProcessor:
    """Return a new processor, one per output; the grammar is compiled once."""
    from ..hf.constrain import constrain

    return constrain(config.tokenizer, **{kind: text})


# The loop

_WARM_UP = Question(
    "warm-up", "", ("The boat leaves at seven, and whoever is late waits for the next one. " * 20,), "text"
)
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Event:
    """A call, before or after it runs."""

    workload: Workload
    method: Method
    item: Item
    phase: str
    """`warming up`, `learning` or `measuring`."""
    outcomes: Repetition | Exception | None = None
    """Result of the call; None before the call."""


Hook = Callable[[Event], None]


def measure(
    config: BenchmarkConfig,
    benchmark: BenchmarkPlan,
    store: Store,
    environment: dict[str, Any],
    hook: Hook = lambda _: None,
) -> None:
    """Measure the items that are missing in `store`. `hook` is called before and after every call."""
    store.open()
    done = store.done
    for workload in benchmark.workloads:
        start = min(done, len(workload.items))
        done -= start
        if start < len(workload.items):
            run = WorkloadRun(config, workload, environment, hook)
            run.prepare(start)
            for index in range(start, len(workload.items)):
                store.append(run.rows_of(index))


@dataclass
class WorkloadRun:
    """State of a workload during measurement."""

    config: BenchmarkConfig
    workload: Workload
    environment: dict[str, Any]
    hook: Hook
    make: Callable[[str], Method] = parse
    """Creates a method from a spec."""

    def prepare(self, done: int) -> None:
        """Warm up, and create methods that have learned from the first `done` items."""
        workload, repeats = self.workload, range(self.config.repeats)
        short = replace(self.config, max_new_tokens=min(_WARM_UP_TOKENS, self.config.max_new_tokens))
        text = Item((_WARM_UP,) * len(workload.items[0].questions))
        for spec in workload.specs:
            self._call(self.make(spec), 0, text, "warming up", short, [[1] * short.max_new_tokens])
        self._methods = [[self.make(spec) for spec in workload.specs] for _ in repeats]
        """Methods of each repetition, in the order of the workload's specs."""
        first = workload.warm_up
        for index, item in enumerate((*first, *workload.items[:done]), start=-len(first)):
            for methods in self._methods:
                self._decode(methods, index, item, "learning")

    def rows_of(self, index: int) -> list[Row]:
        """Measure one item; return a row per method."""
        item = self.workload.items[index]
        repetitions = [self._decode(methods, index, item, "measuring", n) for n, methods in enumerate(self._methods)]
        rows = []
        for number, method in enumerate(self._methods[0]):
            results = [outcomes[number] for outcomes in repetitions]
            divergences = self._divergences(method, repetitions[0], results)
            rows.append(row(self._conditions(method, item), results, divergences))
        return rows

    def _conditions(self, method: Method, item: Item) -> Row:
        """Return the keys of a row that do not depend on the outcome."""
        config = self.config
        return {
            "mode": self.workload.mode,
            "method": method.spec,
            "label": method.label,
            "prompt": item.name,
            "category": item.category,
            "batch": len(item.questions),
            "temperature": config.temperature,
            "max_new_tokens": config.max_new_tokens,
            "seed": config.seed if config.temperature else None,
            "environment": self.environment,
        }

    def _divergences(
        self, method: Method, first: Sequence[Repetition | Exception], results: Sequence[Repetition | Exception]
    ) -> list[dict[str, Any] | None] | None:
        """Return the divergences of a method's repetitions from the first one of plain `generate`; None if they need
        not be equal or cannot be compared.
        """
        specs, needless = self.workload.specs, method.spec == BASELINE or method.forced or self.config.temperature
        if BASELINE not in specs or needless:
            return None
        baseline = first[specs.index(BASELINE)]
        if not isinstance(baseline, list):
            return None
        return [divergence_of(self.config.model, baseline, result) for result in results if isinstance(result, list)]

    def _decode(
        self, methods: Sequence[Method], index: int, item: Item, phase: str, repetition: int = 0
    ) -> list[Repetition | Exception]:
        """Decode an item by every method of a repetition; in the learning phase, skip methods that do not learn."""
        first = (index + repetition) % len(methods)
        order = [*range(first, len(methods)), *range(first)]
        forced = any(method.forced for method in methods)
        order.sort(key=lambda number: forced and methods[number].spec != BASELINE)
        outcomes: dict[int, Repetition | Exception] = {}
        texts: list[list[int]] | None = None
        for number in order:
            method = methods[number]
            needed = forced and method.spec == BASELINE
            if phase == "learning" and not needed and (method.cold or not method.remembers):
                continue
            if method.cold:
                method.reset()
            outcomes[number] = result = self._call(method, index, item, phase, self.config, texts)
            if needed and isinstance(result, list):
                texts = [outcome.tokens[0] for outcome in result]
        return [outcomes[number] for number in sorted(outcomes)]

    def _call(
        self,
        method: Method,
        index: int,
        item: Item,
        phase: str,
        config: BenchmarkConfig,
        texts: Sequence[Sequence[int]] | None,
    ) -> Repetition | Exception:
        event = Event(self.workload, method, item, phase)
        self.hook(event)
        if config.temperature:
            torch.manual_seed(config.seed + index)
        try:
            if method.forced and texts is None:
                raise ValueError(f"{BASELINE} failed, so there is no output to decode")
            outcomes: Repetition | Exception = decode_item(
                config, self.workload.mode, method, item, texts if method.forced else None
            )
        except Exception as error:  # an error of the method or the prompt is a failure in the row
            outcomes = error
        self.hook(replace(event, outcomes=outcomes))
        return outcomes


# Divergence from the baseline's output


def divergence_of(model: PreTrainedModel, baseline: Repetition, repetition: Repetition) -> dict[str, Any] | None:
    """Return the first divergence from the baseline in any turn, or sequence of a batch."""
    for turn, (reference, outcome) in enumerate(zip(baseline, repetition, strict=True)):
        for number, texts in enumerate(zip(reference.prompts, reference.tokens, outcome.tokens, strict=True)):
            divergence = first_divergence(model, *texts)
            if divergence is not None:
                return {"turn": turn if len(reference.tokens) == 1 else number, **asdict(divergence)}
    return None


@dataclass(frozen=True)
class Divergence:
    """The first divergence of two outputs of one model."""

    place: int
    """Index of the first different token, counted from the end of the prompt."""
    margin: float | None
    """The model's logit of `expected` minus that of `got`; small in near-ties. None if an output has ended there."""
    expected: int | None
    got: int | None
    """The two tokens at this position; None if an output has ended."""


@torch.no_grad()
def first_divergence(
    model: PreTrainedModel, prompt: torch.Tensor, expected: Sequence[int], got: Sequence[int]
) -> Divergence | None:
    """Return the first divergence of two outputs after `prompt` (length,), or None if they are equal."""
    for place, (reference, token) in enumerate(zip_longest(expected, got)):
        if reference is None or token is None:
            return Divergence(place, None, reference, token)
        if reference != token:
            text = torch.cat([prompt, prompt.new_tensor(expected[:place])])
            logits = model(input_ids=text[None].to(model.device), use_cache=False).logits[0, -1].float()
            return Divergence(place, float(logits[reference] - logits[token]), reference, token)
    return None
