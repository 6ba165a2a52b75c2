"""What is run in which order: courses of prompts, and the contenders of each.

In one course all contenders decode the same prompts in the same order, and a contender keeps what it learned from
prompt to prompt (*hot start*) unless it is a cold one. The main comparison is a course of generation and one of replay;
studies and batches are further ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .data import Question
from .lanes import Lane
from .methods import BASELINE, REPLAY_BASELINE, Drafted, Method, parse
from .outcome import Outcome
from .prompts import Setup, can_be_replayed, prompt, replayed


class Item(Protocol):
    """What is decoded in one piece, and stands in one row."""

    @property
    def name(self) -> str:
        """Unique within a course."""

    @property
    def category(self) -> str: ...

    @property
    def size(self) -> int:
        """Texts decoded at once."""

    def attempt(self, setup: Setup, lane: Lane, sampling: dict[str, Any]) -> list[Outcome]:
        """One call of the lane for each turn; raises whatever goes wrong."""

    def like(self, question: Question) -> Item:
        """The same kind of item of another question."""


@dataclass(frozen=True)
class Conversation:
    """A question's turns, one after another; later ones follow the lane's own answers."""

    question: Question
    size = 1

    @property
    def name(self) -> str:
        return self.question.name

    @property
    def category(self) -> str:
        return self.question.category

    def like(self, question: Question) -> Conversation:
        return type(self)(question)

    def attempt(self, setup: Setup, lane: Lane, sampling: dict[str, Any]) -> list[Outcome]:
        answers: list[str] = []
        outcomes = []
        for _ in self.question.turns:
            ids, room = prompt(setup, self.question, answers)
            outcomes.append(lane.generate(arguments(setup, [ids], room, sampling)))
            answers.append(setup.decoded(outcomes[-1].tokens[0]))
        return outcomes


@dataclass(frozen=True)
class KnownAnswers(Conversation):
    """The same with the answers that are known."""

    def attempt(self, setup: Setup, lane: Lane, sampling: dict[str, Any]) -> list[Outcome]:
        return [lane.replay(ids, answer) for ids, answer in replayed(setup, self.question)]


@dataclass(frozen=True)
class Batch:
    """First turns of several questions at once, padded on the left."""

    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        return "+".join(question.name for question in self.questions)

    @property
    def category(self) -> str:
        return self.questions[0].category

    @property
    def size(self) -> int:
        return len(self.questions)

    def like(self, question: Question) -> Batch:
        return Batch((question,) * self.size)

    def attempt(self, setup: Setup, lane: Lane, sampling: dict[str, Any]) -> list[Outcome]:
        prompts = [prompt(setup, question) for question in self.questions]
        room = min(room for _, room in prompts)
        return [lane.generate(arguments(setup, [ids for ids, _ in prompts], room, sampling))]


@dataclass(frozen=True)
class Contender:
    """A method at one point of a study."""

    method: Method
    point: str | None = None
    cold: bool = False
    """Whether it forgets everything after every prompt."""
    temperature: float = 0.0

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate`; all are set, so that the model's own configuration cannot add to them."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": 1.0, "top_k": 0}


@dataclass(frozen=True)
class Course:
    """Contenders on the same items in the same order."""

    mode: str
    study: str | None
    contenders: tuple[Contender, ...]
    items: tuple[Item, ...]

    @property
    def title(self) -> str:
        points = {contender.point for contender in self.contenders}
        (point,) = points if len(points) == 1 else (None,)
        return " ".join(filter(None, (self.study, point, self.mode)))

    def baseline(self, contender: Contender) -> Contender | None:
        """The plain decoding whose output this one's must equal: of the same point, else of all points."""
        plain = [one for one in self.contenders if one.method.spec == BASELINE]
        fitting = [one for one in plain if one.point in (contender.point, None)]
        return next(iter(fitting), None)

    def keys(self, item: Item) -> list[tuple[Any, ...]]:
        """What tells the rows of an item from all others, in order."""
        return [(self.mode, self.study, one.point, one.method.spec, item.name) for one in self.contenders]


@dataclass
class Plan:
    """All courses of a run, and what a person must know of them."""

    courses: list[Course] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Plan) -> None:
        """Another plan's courses and notes after these."""
        self.courses += other.courses
        self.notes += [note for note in other.notes if note not in self.notes]

    def items(self) -> Iterator[tuple[Course, Item]]:
        """Every item in the order of measuring."""
        return ((course, item) for course in self.courses for item in course.items)


def arguments(setup: Setup, prompts: Sequence[torch.Tensor], room: int, sampling: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` for prompts (length,), padded on the left."""
    config = setup.model.generation_config
    padding = next((one for one in (config.pad_token_id, config.bos_token_id) if isinstance(one, int)), 0)
    ids = torch.nn.utils.rnn.pad_sequence(list(prompts), True, padding, padding_side="left")
    lengths = torch.tensor([len(one) for one in prompts])
    mask = (torch.arange(ids.shape[1], 0, -1) <= lengths[:, None]).long()
    place = setup.model.device
    return {"input_ids": ids.to(place), "attention_mask": mask.to(place), "max_new_tokens": room, **sampling}


def comparison(methods: Sequence[Method], questions: Sequence[Question], replay: bool) -> Plan:
    """The main comparison: every method on every question, generating and, if wanted, replaying."""
    contenders = [Contender(method) for method in methods]
    plan = Plan([Course("generate", None, with_baseline(contenders), tuple(map(Conversation, questions)))])
    if replay:
        plan.add(replays(None, contenders, questions))
    return plan


def replays(study: str | None, contenders: Sequence[Contender], questions: Sequence[Question]) -> Plan:
    """A course of replay: the methods that can, on the questions whose answer is known."""
    plan, known = Plan(), [question for question in questions if can_be_replayed(question)]
    kept: dict[tuple[str, str | None], Contender] = {}
    for one in contenders:
        method = one.method.in_replay()
        if method is None:
            if one.method.spec != BASELINE:
                plan.notes.append(f"{one.method.spec} decodes by itself and cannot replay a text: left out there")
            continue
        kept.setdefault((method.spec, one.point), Contender(method, one.point, one.cold))
    if len(known) < len(questions):
        missing = len(questions) - len(known)
        plan.notes.append(f"{missing} of {len(questions)} questions have no known answer and are not replayed")
    if not any(one.method.spec == REPLAY_BASELINE for one in kept.values()):
        kept = {(REPLAY_BASELINE, None): Contender(Drafted(REPLAY_BASELINE)), **kept}
    if known:
        plan.courses.append(Course("replay", study, tuple(kept.values()), tuple(map(KnownAnswers, known))))
    return plan


def batches(methods: Sequence[Method], questions: Sequence[Question], sizes: Sequence[int]) -> Plan:
    """For every size a course of batches, each of one category."""
    plan = Plan()
    able = [method for method in methods if method.batches]
    plan.notes += [
        f"{method.spec} decodes one text at a time: left out of batches" for method in methods if not method.batches
    ]
    if any(len(question.turns) > 1 for question in questions):
        plan.notes.append("of conversations only the first turn is decoded in batches")
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    for size in sizes:
        items = []
        for members in by_category.values():
            items += [Batch(tuple(members[place : place + size])) for place in range(0, len(members), size)]
        plan.courses.append(Course("batch", None, with_baseline([Contender(one) for one in able]), tuple(items)))
    return plan


def with_baseline(contenders: Sequence[Contender]) -> tuple[Contender, ...]:
    """The contenders, and before them plain `generate` where it is missing: without it there is nothing to equal."""
    if any(one.method.spec == BASELINE for one in contenders):
        return tuple(contenders)
    return (Contender(parse(BASELINE)), *contenders)
