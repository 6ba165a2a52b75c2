"""Measuring: every contender of a course on every item, in an order that rotates, as often as asked.

What makes the figures honest:

- A warm-up on a text that is not measured, with drafters that are thrown away, pays for first calls.
- Every repeat has its own drafters. So in each of them a prompt meets a drafter that has seen the prompts before it,
  once each, and never the prompt itself; and all repeats do the same work.
- The order of the contenders moves on by one from repeat to repeat and from prompt to prompt, so that none always runs
  on a processor that another has warmed, or slowed.
- A failure is a row that says so.

Resuming an interrupted course, drafters first decode the prompts that are done once more, unmeasured, to learn what
they had learned. Saving what a drafter learned would need to know every drafter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .courses import Contender, Course, Item, Plan
from .data import Question
from .lanes import Lane
from .prompts import Setup
from .rows import Attempt, row
from .store import Store

_WARM_UP = Question(
    "warm-up", "", ("The boat leaves at seven, and whoever is late waits for the next one. " * 20,), "text"
)
_WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Event:
    """A call that is about to be made, or was made."""

    course: Course
    contender: Contender
    item: Item
    phase: str
    """warming up, learning again or measuring."""
    found: Attempt | Exception | None = None
    """What the call gave; None before it."""


Hook = Callable[[Event], None]


def measure(setup: Setup, plan: Plan, store: Store, environment: dict[str, Any], hook: Hook = lambda _: None) -> None:
    """Measures what is missing in `store`. `hook` is called before and after every call."""
    done = store.done
    for course in plan.courses:
        here = min(done, len(course.items))
        done -= here
        if here < len(course.items):
            _Run(setup, course, environment, hook).go_on(here, store)


def calls(plan: Plan, repeats: int, done: int = 0) -> int:
    """How many calls are measured from the item `done` on."""
    return repeats * sum(len(course.contenders) for course, _ in list(plan.items())[done:])


@dataclass
class _Run:
    """One course on its way."""

    setup: Setup
    course: Course
    environment: dict[str, Any]
    hook: Hook

    def go_on(self, done: int, store: Store) -> None:
        """Measures the items from number `done` on."""
        self._warm_up()
        repeats, model = range(self.setup.repeats), self.setup.model
        self._lanes = [[one.method.start(model) for _ in repeats] for one in self.course.contenders]
        self._learn_again(done)
        for place in range(done, len(self.course.items)):
            store.append(self._measured(place))

    def _warm_up(self) -> None:
        short = replace(self.setup, max_new_tokens=min(_WARM_UP_TOKENS, self.setup.max_new_tokens))
        item = self.course.items[0].like(_WARM_UP)
        for one in self.course.contenders:
            self._call(one, one.method.start(self.setup.model), 0, item, "warming up", short)

    def _learn_again(self, done: int) -> None:
        for place, item in enumerate(self.course.items[:done]):
            for one, lanes in zip(self.course.contenders, self._lanes, strict=True):
                if one.method.remembers and not one.cold:
                    for lane in lanes:
                        self._call(one, lane, place, item, "learning again")

    def _measured(self, place: int) -> list[dict[str, Any]]:
        """The rows of one item."""
        contenders, item = self.course.contenders, self.course.items[place]
        attempts: dict[Contender, list[Attempt | Exception]] = {one: [] for one in contenders}
        for repeat in range(self.setup.repeats):
            turn = (place + repeat) % len(contenders)
            for index in (*range(turn, len(contenders)), *range(turn)):
                one = contenders[index]
                lane = one.method.start(self.setup.model) if one.cold else self._lanes[index][repeat]
                attempts[one].append(self._call(one, lane, place, item, "measuring"))
        return [self._row(one, item, attempts) for one in contenders]

    def _row(self, one: Contender, item: Item, attempts: dict[Contender, list[Attempt | Exception]]) -> dict[str, Any]:
        plain = self.course.baseline(one)
        wanted = attempts[plain][0] if plain is not None else None
        return row(self.setup, self.course, one, item, attempts[one], wanted, self.environment)

    def _call(
        self, one: Contender, lane: Lane, place: int, item: Item, phase: str, setup: Setup | None = None
    ) -> Attempt | Exception:
        self.hook(Event(self.course, one, item, phase))
        if one.temperature:
            torch.manual_seed(self.setup.seed + place)
        try:
            found: Attempt | Exception = item.attempt(setup or self.setup, lane, one.sampling)
        except Exception as error:  # whatever goes wrong in a method, or with a prompt, is a failure of theirs
            found = error
        self.hook(Event(self.course, one, item, phase, found))
        return found
