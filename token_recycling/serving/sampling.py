"""What a request says of how tokens are chosen, as transformers takes it: a configuration and logits processors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from ..model.info import model_info
from .errors import invalid
from .logprobs import LogprobRecorder
from .protocol import SamplingRequest

_MOST_DECAY = 60.0
"""Most of the exponent in a penalty for length: logits stay within what 32 bits can say."""
_LONGEST = 1024
"""Tokens of an answer where neither the request nor the context of the model sets a limit."""


def config_of(body: SamplingRequest, model: PreTrainedModel, default_tokens: int | None = None) -> GenerationConfig:
    """The configuration that a request asks for; raises ApiError. `default_tokens`: the length of an answer where the
    request says none, None for the context of the model.
    """
    fields, config = body.generation_config, copy.deepcopy(model.generation_config)
    known = model_info(model)
    given = {} if fields is None else fields.model_dump(exclude_none=True)
    _check_ids(given, known.vocab_size)
    context = known.max_length
    asked = getattr(body, "max_completion_tokens", None) or body.max_tokens
    # What the request leaves open is as the model's own configuration says, but for transformers' default of 50.
    set_by = {"top_k": config.top_k or 0, "max_new_tokens": default_tokens or context or _LONGEST, **given}
    set_by |= {
        name: value
        for name, value in {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": None if body.top_k is None else max(0, body.top_k),
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
            "stop_strings": body.stop or None,
            "max_new_tokens": asked,
            "min_new_tokens": body.min_tokens,
        }.items()
        if value is not None
    }
    for name, value in set_by.items():
        setattr(config, name, value)
    config.eos_token_id = body.ends(config.eos_token_id, known.vocab_size)
    return _settle(config, body.temperature, body.top_p)


_IDS = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "eos_token_id", "pad_token_id", "bos_token_id",
)  # fmt: skip
FORBIDDING = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "no_repeat_ngram_size")
"""Fields that forbid tokens: an output format that allows no others could not be completed."""


def _check_ids(given: Mapping[str, Any], vocabulary: int) -> None:
    """Raise ApiError for token ids in `generation_config` that the model does not have."""
    ids = [token for name in _IDS for token in _flat(given.get(name))]
    ids += [token for sequence, _ in given.get("sequence_bias") or () for token in sequence]
    if max(ids, default=0) >= vocabulary:
        raise invalid("generation_config", f"token ids must be < {vocabulary}, got {max(ids)}")
    forbidden = {*(given.get("suppress_tokens") or ()), *(given.get("begin_suppress_tokens") or ())}
    forbidden.update(sequence[0] for sequence in given.get("bad_words_ids") or () if len(sequence) == 1)
    if len(forbidden) >= vocabulary:
        raise invalid("generation_config", "must leave tokens to choose from, got all of them forbidden")


def _flat(ids: Any) -> Iterator[int]:
    if isinstance(ids, int):
        yield ids
    for one in ids if isinstance(ids, list) else ():
        yield from _flat(one)


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
    body: SamplingRequest,
    config: GenerationConfig,
    prompt_tokens: int,
    vocabulary: int,
    recorder: LogprobRecorder | None = None,
    grammar: Callable[[], LogitsProcessor] | None = None,
) -> LogitsProcessorList:
    """The processors of one text, in the order in which they are called; raises ApiError. The penalties of
    repetition and length move here from the configuration, since the recorder of log-probabilities comes before them.
    """
    found: list[LogitsProcessor] = [] if recorder is None else [recorder]
    if config.repetition_penalty not in (None, 1.0):
        found.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
        config.repetition_penalty = 1.0
    if config.exponential_decay_length_penalty is not None:
        start, factor = config.exponential_decay_length_penalty
        found.append(LengthDecay(start, factor, config.eos_token_id, prompt_tokens))
        config.exponential_decay_length_penalty = None
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


class LengthDecay(LogitsProcessor):
    """transformers' `exponential_decay_length_penalty` for one text: from token `start` of the answer on

        logits[end] += |logits[end]| * (factor ** beyond - 1)

    for every id that ends it. There the power overflows in a long text, and an end that is forbidden gets no number at
    all; here it grows to a bound, and such an end stays as it is.
    """

    def __init__(self, start: int, factor: float, ends: int | list[int] | None, prompt_tokens: int) -> None:
        self._start, self._factor = prompt_tokens + start, factor
        self._ends = [ends] if isinstance(ends, int) else ends or []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        beyond = input_ids.shape[1] - self._start
        if beyond <= 0:
            return scores
        gained = math.exp(min(beyond * math.log(self._factor), _MOST_DECAY)) - 1
        scores = scores.clone()
        for end in self._ends:
            if end < scores.shape[1] and scores[0, end].isfinite():
                scores[0, end] += scores[0, end].abs() * gained
        return scores
