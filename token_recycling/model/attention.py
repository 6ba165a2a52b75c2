"""Tree attention without copies of shared key/value heads.

Where several query heads share one key/value head (grouped-query attention), transformers copies the keys and values of
the whole context once for every query head as soon as there is a mask, in every layer of every step. Here the queries
of one group stand side by side instead, as more rows over the same keys: the same sums, and a step over a tree costs up
to a seventh less. The function is registered under a name of its own and stands in for `sdpa` during tree forwards
only; whatever is not a masked grouped-query call goes to transformers' function.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .architectures import KeyBias

NAME = "token_recycling_tree"

_masks_of_pass: ContextVar[dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] | None] = ContextVar(
    "masks_of_pass", default=None
)
"""Within `attending`: the masks that were made from others, which are kept beside them."""


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
    return attended.reshape(batch, heads, n, value.shape[-1]).transpose(1, 2).contiguous(), None


def _repeated(mask: torch.Tensor, times: int) -> torch.Tensor:
    """The mask with its rows `times` times over; made in the first layer of a pass and kept for the others."""
    # A compiler finds by itself what is made twice, and cannot look into context variables.
    made = None if torch.compiler.is_compiling() else _masks_of_pass.get()
    if made is None:
        return mask.repeat(1, 1, times, 1)
    key = id(mask), times
    if key not in made:
        made[key] = mask, mask.repeat(1, 1, times, 1)
    return made[key][1]


AttentionInterface.register(NAME, tree_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def attending(config: PretrainedConfig, implementation: str) -> Iterator[None]:
    """For the length of the block, a pass or several, a model with this configuration attends with `implementation`."""
    before, token = config._attn_implementation_internal, _masks_of_pass.set({})
    config._attn_implementation_internal = implementation
    try:
        yield
    finally:
        config._attn_implementation_internal = before
        _masks_of_pass.reset(token)


@contextmanager
def biased_by_position(
    model: PreTrainedModel, bias: KeyBias, mask: torch.Tensor, key_positions: torch.Tensor
) -> Iterator[None]:
    """For the length of the block, the bias that a model gives keys by their place in the cache (ALiBi) follows
    `key_positions` (batch or 1, length + n), and `mask` takes the place of the model's own.

    The model has made both for consecutive tokens; hooks before its blocks put them in order. Calls of other threads
    are left alone.
    """
    thread = threading.get_ident()

    def put_in_order(
        module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        if threading.get_ident() != thread:
            return None
        given = kwargs["attention_mask"]
        if bias.in_mask:  # the last query sees all keys, so that its row is the bias alone
            ordered = _by_position(given[:, :, -1:], key_positions)
            own = ordered.masked_fill(mask < 0, torch.finfo(mask.dtype).min)
        else:
            own = mask < 0 if given.dtype == torch.bool else mask
        by_place = kwargs[bias.argument]
        return args, {**kwargs, "attention_mask": own, bias.argument: _by_position(by_place, key_positions)}

    blocks = next(child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList))
    hooks = [block.register_forward_pre_hook(put_in_order, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _by_position(bias: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """The bias (..., 1, keys) of every key's position; for (batch * heads, 1, keys) rows may differ by text."""
    rows = bias.shape[0] // key_positions.shape[0] if bias.ndim == 3 else 1
    places = key_positions.repeat_interleave(rows, 0)
    places = places.view(places.shape[0], *[1] * (bias.ndim - 2), -1)
    # A bias for more keys than there are belongs to the last ones.
    excess = max(0, bias.shape[-1] - 1 - int(key_positions.max())) if bias.shape[-1] > places.shape[-1] else 0
    return bias.gather(-1, (places + excess).expand(*bias.shape[:-1], -1))
