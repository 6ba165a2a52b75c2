"""One call of `generate`, as transformers hands it to the decoding method, and whether it can be accelerated.

What is not known to give the same tokens is not tried: `GenerateCall.ready` names the first thing that stands against
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, StaticCache
from transformers.generation import logits_process as processors
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from ..loop.matchers import for_text
from ..loop.processors import Scope, scope
from ..model.compat import is_callers
from ..model.info import ModelInfo, UnsupportedModelError
from ..model.kv_cache import slots
from ..model.prefill import Reading
from ..model.self_test import ready
from ..model.tree_model import TreeModel
from .cache_handover import unsupported_handover

_KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "cache_params",
    "use_cache",
    "logits_to_keep",
    "tokenizer",
}
_MARKS = {"mm_token_type_ids", "token_type_ids"}
"""Inputs that processors of models for pictures give with every prompt: 0 for a token of text."""
_CRITERIA_BY_TEXT = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria}
"""Criteria that say the same of a text whether they see it alone or in a batch."""


@dataclass(frozen=True)
class GenerateCall:
    """The inputs that `generate` prepared: (batch, length) ids, padded on the left, and all that decides on tokens."""

    input_ids: torch.Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict[str, Any]
    streamer: BaseStreamer | None = None

    @property
    def reading(self) -> Reading | None:
        """The streamer's method `reading_prompt`, where it has one: it is called before each piece of a prompt, and may
        raise to end the call.
        """
        return getattr(self.streamer, "reading_prompt", None)

    @property
    def cache(self) -> Cache:
        """The key/value cache, empty or with a prefix of the text."""
        return self.model_kwargs.get("past_key_values", self.model_kwargs.get("cache_params"))

    @cached_property
    def paddings(self) -> list[int]:
        """Number of padding tokens before each text; -1 where some stand elsewhere, or nothing else is there."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None or (mask.ndim == 2 and bool(mask.all())):
            return [0] * len(self.input_ids)
        text = mask.bool() if mask.ndim == 2 else torch.zeros(len(self.input_ids), 1, dtype=torch.bool)
        lengths = text.sum(dim=1)
        from_the_right = torch.arange(text.shape[1], 0, -1, device=text.device) <= lengths[:, None]
        fits = (text == from_the_right).all(dim=1) & (lengths > 0)
        return torch.where(fits, text.shape[1] - lengths, -1).tolist()

    def ready(self, model: PreTrainedModel, known: TreeModel | None = None) -> TreeModel:
        """The model, or what is `known` of it, ready to decode this call; raises UnsupportedModelError."""
        reason = self._why_not(model)
        if reason is not None:
            raise UnsupportedModelError(reason)
        target = known if known is not None else ready(model)
        reason = self._why_not_with(target.info)
        if reason is not None:
            raise UnsupportedModelError(reason)
        return target

    def _why_not(self, model: PreTrainedModel) -> str | None:
        """Return why this call cannot be accelerated, whatever the model supports, or None."""
        kwargs, config = self.model_kwargs, self.config
        if self.input_ids.shape[1] == 0 or kwargs.get("inputs_embeds") is not None:
            return "expected a prompt of token ids, got embeddings or nothing"
        if not kwargs.get("use_cache", True) or self.cache is None:
            return "expected use_cache=True, got a call without a cache"
        if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
            return "expected output_attentions and output_hidden_states to be off"
        others = self._other_inputs(model)
        if others:
            return f"expected token ids only, got {', '.join(others)}"
        if config.is_assistant:
            return "expected a call of its own, got one that drafts for another model (assisted generation)"
        if _prepares_inputs_elsewhere(model):
            return (
                f"expected {type(model).__name__} to prepare its own inputs, got another object's "
                "prepare_inputs_for_generation set on it (prompt learning?)"
            )
        held = slots(self.cache)
        if held >= self.input_ids.shape[1]:
            return f"expected the whole text, got {self.input_ids.shape[1]} tokens with a cache of {held}"
        if min(self.paddings) < 0:
            return "expected padding on the left only, got zeros elsewhere in the attention mask"
        if not self._counts_from_zero:
            return "expected positions that count from 0, got others in position_ids"
        return None

    def _why_not_with(self, known: ModelInfo) -> str | None:
        """Return why this call cannot be accelerated with what the model supports, or None."""
        alone = len(self.input_ids) == 1
        return (
            (None if alone and not any(self.paddings) else known.batch_reason)
            or (None if alone else self._why_no_batch())
            or (self._why_not_recurrent(known) if known.recurrent else None)
            or unsupported_handover(self.cache, (self.config.max_length or 0) - 1, known.border)
        )

    def _why_not_recurrent(self, known: ModelInfo) -> str | None:
        """Return why this call cannot be accelerated with a model that keeps states over the text, or None."""
        held = slots(self.cache)
        if type(self.cache) is StaticCache:
            return f"expected a dynamic cache for {known.model}, which keeps states over the text, got a static one"
        if held and len(self.input_ids) > 1:
            return f"expected an empty cache for several texts at once with {known.model}, got one of {held} tokens"
        return known.cannot_read_on(held, self.input_ids.shape[1])

    def _other_inputs(self, model: PreTrainedModel) -> list[str]:
        """Inputs beside the text. A model that takes pictures too is given empty ones with a text alone."""
        others = {name for name, value in self.model_kwargs.items() if name not in _KNOWN_INPUTS and value is not None}
        if model.config.get_text_config(decoder=True) is not model.config:
            others -= {name for name in others & _MARKS if not self.model_kwargs[name].any()}
            if "mm_encoder_outputs" in others:
                others.remove("mm_encoder_outputs")
                encoded = self.model_kwargs["mm_encoder_outputs"]
                others |= {f"an encoded {kind}" for kind, value in encoded.items() if value is not None}
        return sorted(others)

    @property
    def _counts_from_zero(self) -> bool:
        """Whether positions, (batch, length) or several such tensors for one text, are those of the text's tokens."""
        positions = self.model_kwargs.get("position_ids")
        if positions is None:
            return True
        if positions.shape[-1] != self.input_ids.shape[1]:
            return False
        positions = torch.atleast_2d(positions)
        kinds = positions.reshape(-1, *positions.shape[-2:]).expand(-1, len(self.paddings), -1)
        counted = torch.arange(kinds.shape[-1], device=kinds.device)
        return all(
            bool((kinds[:, row, padding:] == counted[: len(counted) - padding]).all())
            for row, padding in enumerate(self.paddings)
        )

    def _why_no_batch(self) -> str | None:
        """Why several texts cannot be accelerated where one could, or None."""
        if self.streamer is not None:
            return f"expected one text for a streamer, got {len(self.input_ids)}"
        others = (one for one in self.processors if scope(one) < Scope.EACH_TEXT and for_text(one, 0) is None)
        unknown = sorted({_name(one) for one in others})
        if unknown:
            return (
                f"expected one text, or processors that look at each text alone, got a batch with {', '.join(unknown)}"
            )
        if self.joint_criteria and self.config.return_dict_in_generate and self.config.output_scores:
            names = ", ".join(sorted({_name(one) for one in self.joint_criteria}))
            return f"expected one text, or no output_scores, got a batch with criteria that could read them: {names}"
        return None

    @property
    def cache_is_seen(self) -> bool:
        """Whether the caller has the cache, or will get it."""
        return bool(self.config.return_dict_in_generate or is_callers(self.cache))

    @property
    def pads(self) -> bool:
        """Whether texts that have ended are filled up with padding, as `generate` decides; else all go on together."""
        return any(hasattr(one, "eos_token_id") for one in self.criteria)

    @cached_property
    def padding_token(self) -> int | None:
        """The token that ended texts are filled up with; None if there is none."""
        token = self.config._pad_token_tensor
        return None if token is None else int(token)

    @cached_property
    def joint_criteria(self) -> StoppingCriteriaList:
        """Criteria that must see all texts at once: the caller's own; all, where ended texts go on with the others."""
        others = [one for one in self.criteria if type(one) not in (EosTokenCriteria, MaxLengthCriteria)]
        if len(self.input_ids) == 1 or (self.pads and all(type(one) in _CRITERIA_BY_TEXT for one in others)):
            return StoppingCriteriaList()
        return StoppingCriteriaList(others)

    @property
    def criteria_by_text(self) -> StoppingCriteriaList:
        """The criteria that are applied to each text alone."""
        return StoppingCriteriaList(
            one for one in self.criteria if all(one is not other for other in self.joint_criteria)
        )

    def processors_for(self, row: int) -> LogitsProcessorList:
        """The processors as one text of a batch sees them, alone."""
        if len(self.input_ids) == 1:
            return self.processors
        return LogitsProcessorList([_for_text(processor, row) for processor in self.processors])


def _prepares_inputs_elsewhere(model: PreTrainedModel) -> bool:
    """Whether a function set on the object, not its class's own, prepares its inputs, as for peft's prompt learning."""
    own = type(model).prepare_inputs_for_generation
    prepare = vars(model).get("prepare_inputs_for_generation", own)
    return getattr(prepare, "__func__", prepare) is not own


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _for_text(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    if type(processor) is processors.RepetitionPenaltyLogitsProcessor and isinstance(
        processor.prompt_ignore_length, torch.Tensor
    ):
        ignored = processor.prompt_ignore_length[row : row + 1]
        return processors.RepetitionPenaltyLogitsProcessor(processor.penalty, prompt_ignore_length=ignored)
    if type(processor) is processors.PrefixConstrainedLogitsProcessor:
        allowed = processor._prefix_allowed_tokens_fn
        return processors.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), num_beams=1)
    return for_text(processor, row) or processor
