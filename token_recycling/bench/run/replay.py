"""Replay: reference text is taken as the output (teacher forcing), so that no loop of the model flatters a method.

The target reads drafts and text as usual, and drafters learn from its logits as usual; only the choice at each node on
the path is the reference's next token. This measures how well a method predicts real text, and its cost.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ...drafters._base import Drafter
from ...loop.state import Sequence, TokenSelector
from ...loop.stats import Stats
from ...loop.step import decode
from ...model.self_test import ready
from .outcome import Outcome, Stopwatch


class ReplaySelector(TokenSelector):
    """Chooses the reference text token by token. The model's own choice is made too, so that it costs the same."""

    def __init__(self, sequence: Sequence, following: torch.Tensor) -> None:
        """`following` (length,): the tokens after the prompt."""
        super().__init__(sequence, LogitsProcessorList(), sample=False)
        self._own = TokenSelector(sequence, LogitsProcessorList(), sample=False)
        self._start, self._following = sequence.length, following.tolist()
        self.greedy = False  # so that every choice is made here

    def __call__(self, logits: torch.Tensor) -> int:
        self._own(logits)
        return self._following[self.sequence.length - self._start]


def replay(model: PreTrainedModel, drafter: Drafter, prompt: torch.Tensor, following: torch.Tensor) -> Outcome:
    """Decode `following` (length,) after `prompt` (length,); raises UnsupportedModelError as `accelerate` does."""
    stats, lengths = Stats(synchronize=True), []
    watch = Stopwatch(model.device)
    target = ready(model)
    limit = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + len(following))])
    sequence = Sequence(prompt.to(target.device), limit)
    for (step,) in decode(
        target, [sequence], drafter, [ReplaySelector(sequence, following)], target.new_cache(), stats
    ):
        lengths.append(len(step.tokens))
    seconds, used = watch.read()
    emitted = sequence.tokens[len(prompt) :].tolist()
    assert emitted == following.tolist()
    return Outcome(
        prompts=[prompt],
        tokens=[emitted],
        lengths=lengths,
        steps=stats.steps,
        prefill_seconds=stats.prefill_seconds,
        seconds=stats.decode_seconds,
        total_seconds=seconds,
        processor_seconds=used,
        stats=stats,
    )
