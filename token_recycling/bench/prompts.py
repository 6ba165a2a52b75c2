"""Conversion of questions to prompts in token ids, and the number of tokens that may follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from .._util.chat_templates import readable
from ..model.inspection import context_length
from .data import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptTooLongError(ValueError):
    """The prompt leaves no space for a single token in the model's context."""


@dataclass(frozen=True)
class BenchmarkConfig:
    """Settings shared by all measurements of a run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_new_tokens: int
    chat: bool = False
    """Whether prompts use the chat template; raw texts to continue never do."""
    repeats: int = 1
    seed: int = 0
    temperature: float = 0.0

    @property
    def context(self) -> int | None:
        """Context length of the model, if its configuration states it."""
        return context_length(self.model)

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling arguments of `generate`: greedy, or sampling from all tokens (transformers' default is the top 50).
        The model's own configuration is not used (`without_own_choices`).
        """
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": 1.0, "top_k": 0}

    def ids(self, text: str, special: bool = True) -> torch.Tensor:
        """Return the ids of text, (length,) int64 on the CPU."""
        return torch.tensor(self.tokenizer(text, add_special_tokens=special)["input_ids"], dtype=torch.long)

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return tokens as text, without special tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def arguments(self, prompts: Sequence[torch.Tensor], max_new_tokens: int) -> dict[str, Any]:
        """Return arguments of `generate` for prompts (length,), padded on the left."""
        config = self.model.generation_config
        padding = next((token for token in (config.pad_token_id, config.bos_token_id) if isinstance(token, int)), 0)
        ids = torch.nn.utils.rnn.pad_sequence(list(prompts), True, padding, padding_side="left")
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        mask = (torch.arange(ids.shape[1], 0, -1) <= lengths[:, None]).long()
        device = self.model.device
        return {
            "input_ids": ids.to(device),
            "attention_mask": mask.to(device),
            "max_new_tokens": max_new_tokens,
            **self.sampling,
        }


def prompt(config: BenchmarkConfig, question: Question, answers: Sequence[str] = ()) -> tuple[torch.Tensor, int]:
    """Return the ids (length,) of the turn after these answers, and the number of tokens that may follow.

    With `config.chat`, conversations and single prompts go through the tokenizer's chat template. Otherwise the turns
    of a conversation become `User: ...` and `Assistant:` lines, and a single prompt is used unchanged. A text to
    continue is always used unchanged. A text that is too long is cut and continued from an earlier token; a question is
    never cut: raises PromptTooLongError if it leaves no space in the model's context.
    """
    ids = _encoded(config, question, answers)
    if config.context is None:
        return ids, config.max_new_tokens
    if question.form == "text":
        ids = ids[: _longest_text(config)]
    remaining = config.context - len(ids)
    if remaining < 1:
        raise PromptTooLongError(
            f"the prompt must have fewer tokens than the model's context, {config.context}, got {len(ids)}"
        )
    return ids, min(config.max_new_tokens, remaining)


def replayed(config: BenchmarkConfig, question: Question) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the ids of prompt and answer for every turn with a known answer; answers are cut at `max_new_tokens`.

    For a text to continue, the first half is the prompt and the second half the answer. Earlier turns of a conversation
    contain their known answers.
    """
    if question.form == "text" and not question.references:
        ids = _encoded(config, question)
        half = max(1, len(ids) // 2)
        if config.context is not None:
            half = min(half, _longest_text(config))
        answer = ids[half : half + config.max_new_tokens]
        return [(ids[:half], answer)] if len(answer) else []
    pairs = []
    lead = " " if question.form == "turns" and not config.chat else ""
    for turn, text in enumerate(question.references):
        ids, remaining = prompt(config, question, question.references[:turn])
        pairs.append((ids, config.ids(lead + text, special=False)[:remaining]))
    return pairs


def _longest_text(config: BenchmarkConfig) -> int:
    """Return the maximum prompt length of a text to continue that leaves space for all new tokens."""
    assert config.context is not None
    return max(1, config.context - config.max_new_tokens)


def _encoded(config: BenchmarkConfig, question: Question, answers: Sequence[str] = ()) -> torch.Tensor:
    turns = question.turns[: len(answers) + 1]
    if config.chat and question.form != "text":
        messages = [{"role": "user", "content": turns[0]}]
        for answer, turn in zip(answers, turns[1:], strict=True):
            messages += [{"role": "assistant", "content": answer.strip()}, {"role": "user", "content": turn}]
        messages = readable(config.tokenizer, messages)
        text = config.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return config.ids(str(text), special=False)  # the template adds the special tokens itself
    if question.form != "turns":
        return config.ids(turns[0])
    lines = [f"User: {turn}\nAssistant:" for turn in turns]
    for index, answer in enumerate(answers):
        lines[index] += f" {answer.strip()}\n"
    return config.ids("".join(lines))
