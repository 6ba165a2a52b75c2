"""The texts of a scenario, as items of the bench."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from token_recycling.bench.run.data import Question, load
from token_recycling.bench.run.items import Conversation, Item, ReplayedConversation
from token_recycling.bench.run.prompts import BenchmarkConfig

from .scenarios import Scenario

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo"
"""Questions that are asked where no others are given."""
CODE = ROOT / "models" / "prompts"
"""Python files, continued and replayed."""
LENGTHS = (50, 200, 1000)
"""Tokens of the prompts whose first token is timed."""


def items(scenario: Scenario, config: BenchmarkConfig, data: Sequence[str] = ()) -> tuple[Item, ...]:
    """In the order in which they are measured: of the questions of `data`, or of the demo's; raises ValueError."""
    if scenario.mode == "generate":
        asked = load(data, files="prompt") if data else load([str(DEMO)], files="prompt")
        return tuple(Conversation((Question(one.name, one.category, one.turns[:1], one.form),)) for one in asked)
    if scenario.from_file:
        known = [question for question in load(data) if question.references]
        return tuple(ReplayedConversation((question,)) for question in known if _fits(question, config))
    questions = load([str(CODE)])
    if scenario.mode == "first token":
        return tuple(_beginning(questions, turn, length) for turn in range(len(questions)) for length in LENGTHS)
    return tuple(ReplayedConversation((question,)) for question in questions)


def _fits(question: Question, config: BenchmarkConfig) -> bool:
    """Whether as much of the answer as is replayed fits into the context after the whole prompt."""
    assert config.context is not None
    return len(config.ids(question.turns[0])) + config.max_new_tokens <= config.context


def _beginning(questions: list[Question], turn: int, length: int) -> Item:
    """All texts one after another, another one first at every turn; as many tokens are taken as the category says."""
    text = "\n".join(question.turns[0] for question in questions[turn:] + questions[:turn])
    return Item((Question(f"{length}/{turn}", str(length), (text,), "text"),))
