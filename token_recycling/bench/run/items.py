"""Items: a conversation, a known text to replay, or a batch; each is decoded as a whole and has one row per method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

from .data import Question
from .outcome import Outcome
from .prompts import BenchmarkConfig, prompt, replayed
from .runners import Runner


@dataclass(frozen=True)
class Item:
    """One item of a workload."""

    questions: tuple[Question, ...]

    @property
    def name(self) -> str:
        """Unique within a workload."""
        return "+".join(question.name for question in self.questions)

    @property
    def category(self) -> str:
        return self.questions[0].category

    @property
    def size(self) -> int:
        """Sequences decoded at once."""
        return len(self.questions)

    def run(self, config: BenchmarkConfig, runner: Runner, sampling: dict[str, Any]) -> list[Outcome]:
        """Call the runner once per turn; raises errors of the runner or the prompt."""
        raise NotImplementedError


class Conversation(Item):
    """A question's turns, one after another, with the method's own earlier answers."""

    def run(self, config: BenchmarkConfig, runner: Runner, sampling: dict[str, Any]) -> list[Outcome]:
        (question,) = self.questions
        answers: list[str] = []
        outcomes = []
        prediction = None if question.prediction is None else config.ids(question.prediction, special=False)
        hints = runner.hints(prediction, len(question.turns))
        for _ in question.turns:
            ids, room = prompt(config, question, answers)
            held = {} if question.grammar is None else {"logits_processor": [_processor(config, *question.grammar)]}
            outcomes.append(runner.generate({**arguments(config, [ids], room, sampling), **held}, hints))
            answers.append(config.decoded(outcomes[-1].tokens[0]))
        return outcomes


class ReplayedConversation(Item):
    """A question's turns with the known answers."""

    def run(self, config: BenchmarkConfig, runner: Runner, sampling: dict[str, Any]) -> list[Outcome]:
        (question,) = self.questions
        return [runner.replay(ids, answer) for ids, answer in replayed(config, question)]


class Batch(Item):
    """First turns of several questions at once, padded on the left."""

    def run(self, config: BenchmarkConfig, runner: Runner, sampling: dict[str, Any]) -> list[Outcome]:
        prompts = [prompt(config, question) for question in self.questions]
        room = min(room for _, room in prompts)
        return [runner.generate(arguments(config, [ids for ids, _ in prompts], room, sampling))]


def _processor(config: BenchmarkConfig, kind: str, text: str) -> LogitsProcessor:
    """Return a new processor for each output, of a grammar compiled once."""
    from ...hf.constrain import constrain

    return constrain(config.tokenizer, **{kind: text})


def arguments(
    config: BenchmarkConfig, prompts: Sequence[torch.Tensor], room: int, sampling: dict[str, Any]
) -> dict[str, Any]:
    """Return arguments of `generate` for prompts (length,), padded on the left."""
    known = config.model.generation_config
    padding = next((one for one in (known.pad_token_id, known.bos_token_id) if isinstance(one, int)), 0)
    ids = torch.nn.utils.rnn.pad_sequence(list(prompts), True, padding, padding_side="left")
    lengths = torch.tensor([len(one) for one in prompts])
    mask = (torch.arange(ids.shape[1], 0, -1) <= lengths[:, None]).long()
    device = config.model.device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "max_new_tokens": room, **sampling}
