"""What a request says of how tokens are chosen, as transformers takes it: a configuration and logits processors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from ..model.info import model_info
from .errors import invalid
from .logprobs import LogprobRecorder
from .protocol import Request

_LONGEST = 1024
"""Tokens of an answer where neither the request nor the context of the model sets a limit."""


def config_of(body: Request, model: PreTrainedModel, default_tokens: int | None = None) -> GenerationConfig:
    """The configuration that a request asks for; raises ApiError. `default_tokens`: the length of an answer where the
    request says none, None for the context of the model.
    """
    config, facts = copy.deepcopy(model.generation_config), model_info(model)
    context = facts.max_length
    # What the request leaves open is as the model's own configuration says, but for transformers' default of 50.
    config.top_k = config.top_k or 0
    config.max_new_tokens = default_tokens or context or _LONGEST
    requested = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": None if body.top_k is None else max(0, body.top_k),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "stop_strings": body.stop or None,
        "max_new_tokens": body.limit,
        "min_new_tokens": body.min_tokens,
    }
    for name, value in requested.items():
        if value is not None:
            setattr(config, name, value)
    config.eos_token_id = body.ends(config.eos_token_id, facts.vocab_size)
    return _settle(config, body.temperature, body.top_p)


def _settle(config: GenerationConfig, temperature: float | None, top_p: float | None) -> GenerationConfig:
    """The configuration, drawing or greedy as the request's temperature and top_p say, with stop strings in a list."""
    stops = config.stop_strings
    config.stop_strings = [stops] if isinstance(stops, str) else stops or None
    if temperature == 0:
        config.do_sample = False
    elif temperature or top_p is not None:
        config.do_sample = True
    if not config.do_sample:
        config.temperature = config.top_p = config.top_k = None
    return config


def processors_of(
    body: Request,
    config: GenerationConfig,
    prompt_tokens: int,
    vocabulary: int,
    recorder: LogprobRecorder | None = None,
    grammar: Callable[[], LogitsProcessor] | None = None,
) -> LogitsProcessorList:
    """The processors of one text, in the order in which they are called; raises ApiError. The penalty of
    repetition moves here from the configuration, since the recorder of log-probabilities comes before them.
    """
    found: list[LogitsProcessor] = [] if recorder is None else [recorder]
    if config.repetition_penalty not in (None, 1.0):
        found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        config.repetition_penalty = 1.0
    if body.frequency_penalty or body.presence_penalty:
        found.append(AdditivePenalties(body.frequency_penalty or 0, body.presence_penalty or 0, prompt_tokens))
    if body.bias is not None:
        largest = max(map(int, body.logit_bias or ()))
        if largest >= vocabulary:
            raise invalid("logit_bias", f"token ids must be < {vocabulary}, got {largest}")
        found.append(body.bias)
    if grammar is not None:
        found.append(grammar())
    return LogitsProcessorList(found)


class AdditivePenalties(LogitsProcessor):
    """The penalties of OpenAI's API, for one text, whose prompt has `prompt_tokens`:

        logits[j] -= count[j] * frequency_penalty + (count[j] > 0) * presence_penalty

    `count` is how often the answer has the token; the prompt does not count (platform.openai.com/docs, "Frequency and
    presence penalties"). Cost: a count of the answer's tokens, for every emitted token.
    """

    def __init__(self, frequency: float, presence: float, prompt_tokens: int) -> None:
        self._frequency, self._presence, self._prompt = frequency, presence, prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt :], minlength=scores.shape[-1])
        return scores - (counts * self._frequency + (counts > 0) * self._presence)
