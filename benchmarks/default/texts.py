"""The texts of a scenario, as items of the bench."""

from __future__ import annotations

import random
from pathlib import Path

from token_recycling.bench.run.data import Question, load
from token_recycling.bench.run.items import Conversation, Item, ReplayedConversation
from token_recycling.bench.run.prompts import BenchmarkConfig

from .scenarios import Scenario

PROMPTS = Path(__file__).parents[2] / "models" / "prompts"
LENGTHS = (50, 200, 1000)
"""Tokens of the prompts whose first token is timed."""
_MOST = 48
"""Texts of a file."""


def items(scenario: Scenario, config: BenchmarkConfig, file: Path | None) -> tuple[Item, ...]:
    """In the order in which they are measured; raises ValueError for a file without what is needed."""
    if scenario.from_file:
        assert file is not None
        questions = [question for question in _read(file) if _fits(question, config)]
        # A file may be sorted by task, and a run that ends early should have seen all of them.
        questions = random.Random(0).sample(questions, min(_MOST, len(questions)))
    else:
        questions = load([str(PROMPTS)])
    if scenario.mode == "first token":
        return tuple(_beginning(questions, turn, length) for turn in range(len(questions)) for length in LENGTHS)
    kind = ReplayedConversation if scenario.mode == "replay" else Conversation
    return tuple(kind((question,)) for question in questions)


def _read(file: Path) -> list[Question]:
    questions = load([str(file)])
    unknown = next((question.name for question in questions if not question.references), None)
    if unknown is not None:
        raise ValueError(f"expected a known answer to every question of {file}, got none to {unknown}")
    return questions


def _fits(question: Question, config: BenchmarkConfig) -> bool:
    """Whether as much of the answer as is replayed fits into the context after the whole prompt."""
    assert config.context is not None
    return len(config.ids(question.turns[0])) + config.max_new_tokens <= config.context


def _beginning(questions: list[Question], turn: int, length: int) -> Item:
    """All texts one after another, another one first at every turn; as many tokens are taken as the category says."""
    text = "\n".join(question.turns[0] for question in questions[turn:] + questions[:turn])
    return Item((Question(f"{length}/{turn}", str(length), (text,), "text"),))
