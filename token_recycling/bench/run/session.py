"""From what a user asks for to a plan, and the settings that a resumed run must share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .courses import Plan, batches, comparison
from .data import Question, digest
from .methods import DEFAULT, Method, parse
from .prompts import PromptTooLongError, Setup, prompt
from .studies import study

_SHARED = (
    *("machine", "cpu", "threads", "accelerator", "python", "torch", "transformers", "token_recycling"),
    *("model_fingerprint", "dtype", "commit"),
)
"""What of the environment must be the same."""


def methods(specs: Sequence[str]) -> list[Method]:
    """The methods that a user names; raises ValueError for one named twice, and as `parse` does."""
    doubled = next((spec for place, spec in enumerate(specs) if spec in specs[:place]), None)
    if doubled is not None:
        raise ValueError(f"expected every method once, got {doubled!r} twice")
    return [parse(spec) for spec in specs]


def plan(
    named: Sequence[Method],
    questions: Sequence[Question],
    replay: bool | None = None,
    studies: Sequence[str] = (),
    sizes: Sequence[int] = (),
    seed: int = 0,
) -> Plan:
    """The courses of the studies and batches asked for, else of the main comparison; raises ValueError.

    `replay` None means where it is possible: everywhere but in batches.
    """
    if sizes and not studies and replay:
        raise ValueError("expected --replay without --batch: texts are replayed one at a time")
    made = Plan()
    for name in dict.fromkeys(studies):
        made.add(study(name, named, questions, replay is not False, seed))
    if sizes:
        made.add(batches(named or [one for one in map(parse, DEFAULT) if one.batches], questions, sizes))
    if not studies and not sizes:
        made.add(comparison(named or [parse(spec) for spec in DEFAULT], questions, replay is not False))
    return made


def what_does_not_fit(setup: Setup, questions: Sequence[Question]) -> list[str]:
    """Sentences on the questions that will fail because their first turn is too long, and texts that are cut."""
    if setup.context is None:
        return []
    failing = cut = 0
    for question in questions:
        try:
            ids, _ = prompt(setup, question)
        except PromptTooLongError:
            failing += 1
            continue
        if question.form == "text" and len(ids) < len(setup.ids(question.turns[0])):
            cut += 1
    said = []
    if failing:
        said.append(
            f"{failing} of {len(questions)} questions are longer than the model's context of {setup.context} tokens "
            "and count as failures"
        )
    if cut:
        said.append(f"{cut} of {len(questions)} texts are continued from an earlier place, so that they fit")
    return said


def settings(setup: Setup, questions: Sequence[Question], made: Plan, environment: dict[str, Any]) -> dict[str, Any]:
    """What must be equal for rows of two runs to stand in one folder."""
    return {
        "questions": f"{len(questions)}, {digest(questions)}",
        "courses": {
            f"{course.mode}, {place}": {
                "study": course.study,
                "contenders": [
                    " ".join(filter(None, (one.method.spec, one.point and f"at {one.point}")))
                    for one in course.contenders
                ],
                "items": len(course.items),
            }
            for place, course in enumerate(made.courses)
        },
        "max_new_tokens": setup.max_new_tokens,
        "repeats": setup.repeats,
        "chat": setup.chat,
        "seed": setup.seed,
        **{name: environment[name] for name in _SHARED},
    }
