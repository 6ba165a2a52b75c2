"""Tree attention without copies of shared key/value heads.

Where several query heads share one key/value head (grouped-query attention), transformers copies the keys and values of
the whole context once for every query head as soon as there is a mask, in every layer of every step. Here the queries
of one group stand side by side instead, as more rows over the same keys: the same sums, and a step over a tree costs up
to a seventh less. The function is registered under a name of its own and stands in for `sdpa` during tree forwards
only; whatever is not a masked grouped-query call goes to transformers' function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "token_recycling_tree"


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of queries (batch, heads, n, size) on keys and values (batch, key/value heads, length, size).

    `attention_mask` is added to the scores, (batch or 1, 1, n, length). Returns (batch, n, heads, size).
    """
    batch, heads, n, size = query.shape
    shared = heads // key.shape[1]
    if (
        attention_mask is None
        or attention_mask.shape[1] != 1
        or others.get("position_bias") is not None
        or shared == 1
        or n == 1
        or module.training
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, heads // shared, shared * n, size),
        key,
        value,
        attn_mask=_repeated(attention_mask, shared),
        scale=scaling,
    )
    return attended.reshape(batch, heads, n, value.shape[-1]).transpose(1, 2), None


def _repeated(mask: torch.Tensor, times: int) -> torch.Tensor:
    """The mask with its rows `times` times over; made in the first layer of a pass and kept on it for the others."""
    kept = getattr(mask, "_repeated", None)
    if kept is None or kept[0] != times:
        kept = (times, mask.repeat(1, 1, times, 1))
        mask._repeated = kept  # type: ignore[attr-defined]
    return kept[1]


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def attending_trees(config: PretrainedConfig) -> Iterator[None]:
    """For the length of the block, a model with this configuration attends with `tree_attention` where it would with
    `sdpa`.
    """
    before = config._attn_implementation_internal
    if before != "sdpa":
        yield
        return
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
