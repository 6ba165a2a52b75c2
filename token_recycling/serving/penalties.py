"""The penalties of OpenAI's API: a token that the answer has already costs something, each time and once.

    logits[j] -= count[j] * frequency_penalty + (count[j] > 0) * presence_penalty

`count` is how often the answer has the token; the prompt does not count (platform.openai.com/docs, "Frequency and
presence penalties"). Called once for every emitted token with the tokens before it, as all processors are, so that
drafting changes nothing. Cost: a count of the answer's tokens.
"""

from __future__ import annotations

import torch
from transformers import LogitsProcessor


class AdditivePenalties(LogitsProcessor):
    """For one text, whose prompt has `prompt_tokens`."""

    def __init__(self, frequency: float, presence: float, prompt_tokens: int) -> None:
        self._frequency, self._presence, self._prompt = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[-1])
        return scores - (counts * self._frequency + (counts > 0) * self._presence)
