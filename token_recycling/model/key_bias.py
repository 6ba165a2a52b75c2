"""Trees in models with a bias by the cache slot of a key (ALiBi): here the bias follows positions.

Cost: hooks before all blocks during a forward pass, and a copy of the bias in each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from .architectures import KeyBias


@contextmanager
def biased_by_position(
    model: PreTrainedModel, bias: KeyBias, mask: torch.Tensor, key_positions: torch.Tensor
) -> Iterator[None]:
    """Within the block, the bias that a model gives keys by their cache slot (ALiBi) follows `key_positions` (batch or
    1, length + n), and `mask` replaces the model's own. The model has computed both for consecutive tokens; hooks
    before its blocks reorder them, in this thread only.
    """
    thread = threading.get_ident()

    def reorder_bias(
        module: torch.nn.Module, args: tuple, kwargs: dict[str, Any] | None = None
    ) -> tuple[tuple, dict[str, Any]] | None:
        # A hook that is removed while another thread's pass is about to call it gets no keyword arguments.
        if kwargs is None or threading.get_ident() != thread:
            return None
        own_mask = kwargs["attention_mask"]
        if bias.in_mask:  # the last query sees all keys, so its row is only the bias
            ordered = _by_position(own_mask[:, :, -1:], key_positions)
            ordered_mask = ordered.masked_fill(mask < 0, torch.finfo(mask.dtype).min)
        else:
            ordered_mask = mask < 0 if own_mask.dtype == torch.bool else mask
        own_bias = kwargs[bias.argument]
        return args, {**kwargs, "attention_mask": ordered_mask, bias.argument: _by_position(own_bias, key_positions)}

    blocks = next(child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList))
    hooks = [block.register_forward_pre_hook(reorder_bias, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _by_position(bias: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
    """Return the bias (..., 1, keys) of every key's position; in (batch * heads, 1, keys) it may differ by sequence."""
    rows = bias.shape[0] // key_positions.shape[0] if bias.ndim == 3 else 1
    places = key_positions.repeat_interleave(rows, 0)
    places = places.view(places.shape[0], *[1] * (bias.ndim - 2), -1)
    # If the bias has more columns than there are keys, the last ones are theirs.
    excess = max(0, bias.shape[-1] - 1 - int(key_positions.max())) if bias.shape[-1] > places.shape[-1] else 0
    return bias.gather(-1, (places + excess).expand(*bias.shape[:-1], -1))
