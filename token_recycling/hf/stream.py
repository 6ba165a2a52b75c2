"""Decoding step by step on token ids: each step shows its draft, logits and emitted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from ..drafters._base import Drafter
from ..drafters._registry import make_drafter
from ..loop.batch import decode
from ..loop.stats import Stats
from ..model.backend import Backend, Fast
from ..model.compat import mark_callers
from ..model.info import UnsupportedModelError
from ..model.kv_cache import TreeCache
from ..model.prefill import checked_prompt
from ..model.support import ready
from ..trees.draft import Step
from .call import GenerateCall, requests_of


def stream(
    model: PreTrainedModel,
    /,
    input_ids: torch.Tensor,
    drafter: str | Drafter = "recycling",
    *,
    max_new_tokens: int = 256,
    eos_token_id: int | list[int] | None = None,
    do_sample: bool = False,
    logits_processor: list[LogitsProcessor] | None = None,
    stopping_criteria: list[StoppingCriteria] | None = None,
    past_key_values: Cache | None = None,
    stats: Stats | None = None,
    fast: Fast = "auto",
    **options: Any,
) -> Iterator[Step]:
    """Generate step by step: each `Step` has the draft, the logits at its nodes and the emitted tokens.

    The first step reads the prompt and verifies a draft; for the earliest first token, call `generate` with a streamer.
    `input_ids` is (length,) or (1, length) int64. `eos_token_id` defaults to the model's; pass [] for none. `options`
    are passed to the drafter; `fast`, and `reproducible` among them, are as in `accelerate`. Raises
    UnsupportedModelError, or ValueError for an input that cannot be continued, immediately; if the drafter does not fit
    the model, the first step that drafts raises.
    """
    backend, target, drafter = Backend(fast, suspends=True), ready(model), make_drafter(drafter, **options)
    if not isinstance(input_ids, torch.Tensor):
        raise TypeError(f"input_ids must be a tensor, got {type(input_ids).__name__}; make one with torch.tensor()")
    prompt = checked_prompt(input_ids, target)
    if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens!r}")
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + max_new_tokens), *(stopping_criteria or [])])
    eos = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    if eos is not None and eos != []:
        criteria.append(EosTokenCriteria(eos))
    given = DynamicCache(config=target.config) if past_key_values is None else past_key_values
    if isinstance(given, StaticCache):
        raise UnsupportedModelError("StaticCache is unsupported: it cannot keep chosen slots; use a DynamicCache")
    mark_callers(past_key_values)
    processors = LogitsProcessorList(logits_processor or [])
    # One sequence is never padded, whatever ends it.
    config = GenerationConfig(do_sample=do_sample, max_length=len(prompt) + max_new_tokens, pad_token_id=0)
    call = GenerateCall(target, prompt[None], processors, criteria, config, {target.cache_argument: given})
    with torch.no_grad():  # as in each step
        reason = call.why_not(model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    cache = TreeCache(given)
    requests = requests_of(call, drafter, stats if stats is not None else Stats(), [cache.length])

    def steps() -> Iterator[Step]:
        try:
            with closing(decode(requests, cache, backend)) as passes:
                for (step,) in passes:
                    yield step
        finally:
            if past_key_values is not None:
                cache.release()

    return steps()
