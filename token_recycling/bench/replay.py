"""Replay: held-out text taken as the output, so that no loop of the model can flatter a method.

The target reads drafts and text as always, and drafters learn from its logits as always; only the choice at each node
on the path is the text's own next token. What is measured is how well a method foresees real text, and what that takes.
"""

from __future__ import annotations

import time

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from ..decode import decode
from ..drafting import Drafter
from ..stats import Stats
from ..target import Target
from ..text import Chooser, Text
from .outcome import Outcome, wait


class TextChooser(Chooser):
    """Chooses the given text, token after token. The model's own choice is made too, so that it costs what it costs."""

    def __init__(self, text: Text, following: torch.Tensor) -> None:
        """`following` (length,) are the tokens after the text so far."""
        super().__init__(text, LogitsProcessorList(), sample=False)
        self._own = Chooser(text, LogitsProcessorList(), sample=False)
        self._start, self._following = text.length, following.tolist()
        self.greedy = False  # so that every choice is asked for here

    def __call__(self, logits: torch.Tensor) -> int:
        self._own(logits)
        return self._following[self.text.length - self._start]


def replay(model: PreTrainedModel, drafter: Drafter, prompt: torch.Tensor, following: torch.Tensor) -> Outcome:
    """Decodes `following` (length,) after `prompt` (length,); raises UnsupportedModelError as `accelerate` does."""
    stats, lengths = Stats(synchronize=True), []
    wait(model.device)
    began = time.perf_counter()
    target = Target(model)
    limit = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + len(following))])
    text = Text(prompt.to(target.device), limit)
    for (step,) in decode(target, [text], drafter, [TextChooser(text, following)], target.new_cache(), stats):
        lengths.append(len(step.tokens))
    wait(model.device)
    seconds = time.perf_counter() - began
    emitted = text.tokens[len(prompt) :].tolist()
    assert emitted == following.tolist()
    return Outcome(
        [prompt], [emitted], lengths, stats.steps, stats.prefill_seconds, stats.decode_seconds, seconds, stats
    )
