"""Two faults of vLLM's CPU build (seen in 0.32) in verifying drafts of sampled requests, repaired where they are found.

- `expand_batch_to_tokens` writes temperature, top-k and top-p of the requests into a copy that is discarded, so that
  drafted positions are sampled with whatever was in memory.
- A step without a draft fails where top-k is set and top-p is not: it takes the maximum of an empty tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from .versions import check_signature

_EXPAND = ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")
_CONSTRAIN = ("logits", "cu_num_draft_tokens", "sampling_metadata")


def repair_sampler() -> None:
    """Replaces the faulty functions in vLLM's rejection sampler; raises RuntimeError where they are not as known."""
    from vllm.v1.sample import rejection_sampler

    for name, wanted in (("expand_batch_to_tokens", _EXPAND), ("apply_sampling_constraints", _CONSTRAIN)):
        check_signature("vLLM", name, getattr(rejection_sampler, name), wanted)
    if not expands(rejection_sampler.expand_batch_to_tokens):
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    if not _filters_nothing(rejection_sampler.apply_top_k_top_p):
        constrain = rejection_sampler.apply_sampling_constraints

        def apply_sampling_constraints(logits: torch.Tensor, cu_num_draft_tokens: Any, sampling_metadata: Any) -> Any:
            return constrain(logits, cu_num_draft_tokens, sampling_metadata) if len(logits) else logits

        rejection_sampler.apply_sampling_constraints = apply_sampling_constraints


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """(batch,) to (num_tokens,): each value repeated for the tokens of its request; `cu_num_tokens` is their sum."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(replaced, counts, output_size=num_tokens)


def expands(function: Any) -> bool:
    """Whether a function does what `expand_batch_to_tokens` does."""
    given = torch.tensor([0.5, 0.0, 0.75, 2.5]), torch.tensor([2, 3, 3, 6], dtype=torch.int32), 6
    return torch.equal(function(*given, replace_from=0, replace_to=1), torch.tensor([0.5, 0.5, 1.0, 2.5, 2.5, 2.5]))


def _filters_nothing(function: Any) -> bool:
    """Whether top-k works on no rows at all."""
    try:
        function(torch.empty(0, 4), torch.empty(0, dtype=torch.int32), None)
    except (RuntimeError, IndexError):
        return False
    return True
