"""One call of `generate`, as transformers hands it to the decoding method, and whether it can be accelerated.

What is not known to give the same tokens is not tried: `Call.why_not` names the first thing that stands against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from .architectures import support
from .target import unsupported, unsupported_cache

_KNOWN_INPUTS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "tokenizer"}
_PROCESSORS_BY_TEXT = {
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.ExponentialDecayLengthPenalty,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.MinPLogitsWarper,
    processors.NoBadWordsLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.PrefixConstrainedLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
    processors.SuppressTokensLogitsProcessor,
    processors.TemperatureLogitsWarper,
    processors.TopHLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.WatermarkLogitsProcessor,
}
"""Processors that treat every text of a batch alone."""
_CRITERIA_BY_TEXT = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}
"""Criteria that say the same of a text whether they see it alone or in a batch."""


@dataclass(frozen=True)
class Call:
    """What `generate` has prepared: (batch, length) ids, padded on the left, and all that decides on tokens."""

    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: BaseStreamer | None = None

    @property
    def cache(self) -> Cache:
        """The key/value cache, empty or with a prefix of the text."""
        return self.model_kwargs["past_key_values"]

    @cached_property
    def paddings(self) -> list[int]:
        """Number of padding tokens before each text; -1 where some stand elsewhere, or nothing else is there."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            return [0] * len(self.input_ids)
        own = mask.bool() if mask.ndim == 2 else torch.zeros(len(self.input_ids), 1, dtype=torch.bool)
        lengths = own.sum(dim=1)
        from_the_right = torch.arange(own.shape[1], 0, -1, device=own.device) <= lengths[:, None]
        fits = (own == from_the_right).all(dim=1) & (lengths > 0)
        return torch.where(fits, own.shape[1] - lengths, -1).tolist()

    def why_not(self, model: PreTrainedModel) -> str | None:
        """Why this call cannot be accelerated, or None."""
        kwargs, config = self.model_kwargs, self.config
        if self.input_ids.shape[1] == 0 or kwargs.get("inputs_embeds") is not None:
            return "expected a prompt of token ids, got embeddings or nothing"
        if not kwargs.get("use_cache", True) or kwargs.get("past_key_values") is None:
            return "expected use_cache=True, got a call without a cache"
        if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
            return "expected output_attentions and output_hidden_states to be off"
        others = sorted(name for name, value in kwargs.items() if name not in _KNOWN_INPUTS and value is not None)
        if others:
            return f"expected token ids only, got {', '.join(others)}"
        held = self.cache.get_seq_length()
        if held >= self.input_ids.shape[1]:
            return f"expected the whole text, got {self.input_ids.shape[1]} tokens with a cache of {held}"
        if min(self.paddings) < 0:
            return "expected padding on the left only, got zeros elsewhere in the attention mask"
        if not self._counts_from_zero:
            return "expected positions that count from 0, got others in position_ids"
        alone = len(self.input_ids) == 1 and not any(self.paddings)
        return (
            unsupported(model)
            or (None if alone else support(model).batch_reason or self._why_no_batch())
            or unsupported_cache(self.cache)
        )

    @property
    def _counts_from_zero(self) -> bool:
        positions = self.model_kwargs.get("position_ids")
        if positions is None:
            return True
        rows = [
            row[padding:] for row, padding in zip(positions.expand(len(self.paddings), -1), self.paddings, strict=True)
        ]
        return all(torch.equal(row, torch.arange(len(row), device=row.device)) for row in rows)

    def _why_no_batch(self) -> str | None:
        """Why several texts, or a padded one, cannot be accelerated where one without padding could, or None."""
        cache = self.cache
        if self.config.return_dict_in_generate or cache.get_seq_length() or getattr(cache, "_is_user_defined", False):
            return "expected one text without padding, or neither return_dict_in_generate nor a cache of the caller's"
        if self.streamer is not None:
            return f"expected one text without padding for a streamer, got {len(self.input_ids)}"
        own = sorted({_name(one) for one in self.criteria if type(one) not in _CRITERIA_BY_TEXT})
        if own:
            return f"expected one text, or transformers' own criteria, got a batch with {', '.join(own)}"
        if len(self.criteria) > 1 and not any(type(one) is EosTokenCriteria for one in self.criteria):
            return "expected one text, or an end-of-sequence token, got a batch with other criteria only"
        unknown = sorted({_name(one) for one in self.processors if type(one) not in _PROCESSORS_BY_TEXT})
        if unknown:
            return (
                f"expected one text, or processors that look at each text alone, got a batch with {', '.join(unknown)}"
            )
        return None

    def processors_for(self, row: int) -> LogitsProcessorList:
        """The processors as one text of a batch sees them, alone."""
        if len(self.input_ids) == 1:
            return self.processors
        return LogitsProcessorList([_for_text(processor, row) for processor in self.processors])


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _for_text(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    if type(processor) is processors.RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        own = processor.prompt_ignore_length[row : row + 1]
        return processors.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=own)
    if type(processor) is processors.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return processors.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    return processor
