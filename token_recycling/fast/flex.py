"""Tree attention through flex_attention: a kernel made for this mask, which reads every key once for all heads.

Where key/value heads are shared, the kernel groups their queries; where queries are few, it splits the text among the
processors. It is worth something for long texts on an accelerator, where the general kernel for masks of any form does
neither. It exists only compiled. The additive mask of the step is read as it is, entry by entry, so that windows are
what they are elsewhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "token_recycling_flex"


@torch.library.custom_op("token_recycling::in_memory", mutates_args=())
def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that no compiler looks through: the kernel reads the mask, instead of making it anew entry by entry, which
    for a CPU it cannot.
    """
    return tensor.clone()


@in_memory.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


def flex_tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """As `attention.tree_attention`: queries (1, heads, n, size), a mask (1, 1, n, length) to be added to scores."""
    if attention_mask is None or others.get("position_bias") is not None or key.shape[-1] != value.shape[-1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    added = in_memory(attention_mask)[0, 0]

    def masked(
        score: torch.Tensor, batch: torch.Tensor, head: torch.Tensor, node: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return score + added[node, slot]

    shared = query.shape[1] != key.shape[1]
    attended = flex_attention(query, key, value, score_mod=masked, scale=scaling, enable_gqa=shared)
    assert isinstance(attended, torch.Tensor)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, flex_tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
