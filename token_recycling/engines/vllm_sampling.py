"""`min_p` and `logit_bias` of requests that are drafted for in vLLM, which refuses them with any speculation (0.32).

vLLM lacks three things, each in one place:

- `SamplingParams._validate_spec_decode` refuses such requests, in the process that takes them in. `register` lets them
  through where the drafter is this package's; vLLM calls it in every process, by its entry point.
- `build_logitsprocs` makes none of vLLM's own two processors where there is speculation. With them, rows without a
  draft and the row after a draft are processed as always.
- `RejectionSampler.apply_logits_processors`, for drafted positions, knows penalties, banned words and `min_tokens`
  alone. Here biases are added before it and `min_p` masks after it, as in vLLM's `Sampler`, whose order that is.

So the rejection sampler sees the distribution that is sampled from without speculation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from .versions import wrap_once

logger = logging.getLogger("token_recycling")

PROPOSER = "token_recycling.engines.vllm.TokenRecycling"
_VALIDATE = ("self", "speculative_config")
_BUILD = ("vllm_config", "device", "is_pin_memory", "is_pooling_model", "custom_logitsprocs")
_APPLY = ("self", "logits", "sampling_metadata", "metadata")


def register() -> None:
    """Lets requests with `min_p` or `logit_bias` through where drafts are from this package; harmless when repeated.
    In a vLLM that is not known they stay refused, by vLLM.
    """
    from vllm.sampling_params import SamplingParams

    try:
        wrap_once("vLLM", SamplingParams, "_validate_spec_decode", _VALIDATE, _lenient)
    except RuntimeError as unknown:
        logger.debug("requests with min_p or logit_bias stay refused: %s", unknown)


def process_drafts() -> None:
    """Applies `min_p` and `logit_bias` to drafted positions, in a worker, before its runner has made its processors.
    Raises RuntimeError where vLLM's functions are not as known.
    """
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.worker import gpu_model_runner

    wrap_once("vLLM", gpu_model_runner, "build_logitsprocs", _BUILD, _complete)
    wrap_once("vLLM", RejectionSampler, "apply_logits_processors", _APPLY, _at_drafts)


def add_biases(logits: torch.Tensor, biases: dict[int, dict[int, float]], counts: list[int]) -> None:
    """Adds to `logits` (n, vocabulary), in place, the biases by token of each request by its place; `counts` of the n
    rows belong to one request after the other.
    """
    ends = torch.tensor(counts).cumsum(0).tolist()
    cells = [
        (row, token, bias)
        for place, of_request in biases.items()
        for row in range(ends[place] - counts[place], ends[place])
        for token, bias in of_request.items()
    ]
    if cells:
        rows, tokens, values = zip(*cells, strict=True)
        where = torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device)
        logits[where] += torch.tensor(values, device=logits.device, dtype=logits.dtype)


def mask_min_p(logits: torch.Tensor, min_p: torch.Tensor, temperature: torch.Tensor) -> None:
    """Masks, in place, what has less than a share `min_p` (n,) of the probability of the likeliest token of its row, at
    a temperature (n,); `logits` (n, vocabulary) are not yet divided by it. Greedy rows, whose temperature is 0, keep
    their likeliest tokens.
    """
    least = logits.amax(-1) + torch.where(min_p > 0, temperature * min_p.log(), -torch.inf)
    logits.masked_fill_(logits < least[:, None], -torch.inf)


def _lenient(original: Callable[..., Any]) -> Callable[..., Any]:
    def _validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if not _is_ours(speculative_config):
            original(self, speculative_config)

    return _validate_spec_decode


def _complete(original: Callable[..., Any]) -> Callable[..., Any]:
    def build_logitsprocs(vllm_config: Any, device: Any, is_pin_memory: Any, *more: Any, **named: Any) -> Any:
        from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor

        built = original(vllm_config, device, is_pin_memory, *more, **named)
        if _is_ours(vllm_config.speculative_config):
            built.argmax_invariant.append(MinPLogitsProcessor(vllm_config, device, is_pin_memory))
            built.non_argmax_invariant.append(LogitBiasLogitsProcessor(vllm_config, device, is_pin_memory))
        return built

    return build_logitsprocs


def _at_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_logits_processors(self: Any, logits: torch.Tensor, sampling_metadata: Any, metadata: Any) -> Any:
        from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinPLogitsProcessor

        processors, counts = list(sampling_metadata.logitsprocs.all), list(metadata.num_draft_tokens)
        for processor in processors:
            if isinstance(processor, LogitBiasLogitsProcessor) and processor.biases:
                add_biases(logits, processor.biases, counts)
        logits = original(self, logits, sampling_metadata, metadata)
        for processor in processors:
            if (
                isinstance(processor, MinPLogitsProcessor)
                and processor.min_p_count
                and not sampling_metadata.all_greedy
            ):
                by_request = torch.tensor([processor.get_min_p_by_index(place) for place in range(len(counts))])
                repeats = torch.tensor(counts, device=logits.device)
                of_rows = (each.to(logits.device) for each in (by_request, sampling_metadata.temperature))
                mask_min_p(logits, *(each.repeat_interleave(repeats, output_size=len(logits)) for each in of_rows))
        return logits

    return apply_logits_processors


def _is_ours(speculative_config: Any) -> bool:
    return speculative_config is not None and (speculative_config.method, speculative_config.model) == (
        "custom_class",
        PROPOSER,
    )
