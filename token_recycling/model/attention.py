"""Attention for forward passes over trees; it replaces the implementation that a model's configuration names.

It differs from a model's own attention in two ways. With grouped-query attention and a mask, transformers copies the
keys and values of the whole context for every query head. Here the queries of one group become more rows over the same
keys: the same sums, and a tree step costs up to a seventh less. And implementations that do not support arbitrary masks
(flash, flex) are replaced by one that does.

A configuration is shared by all threads, so it is never changed. Instead, wrappers replace the functions registered
with transformers under a name, and read a context variable: outside of our forward passes, and for any other model,
they call the original. A compiler cannot read the variable: in its graphs `sdpa` attends as registered, and other
implementations attend as `sdpa` does if they are given a four-dimensional mask.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from .compat import attention_name

Attended = tuple[torch.Tensor, torch.Tensor | None]
"""The output of attention, (batch, n, heads, size), and its weights where an implementation returns them."""


@dataclass(frozen=True)
class _Pass:
    """Attention settings for the passes of one model."""

    config: PretrainedConfig
    attention: str
    """sdpa or eager."""
    grouped: bool
    """Whether queries of one group read shared keys without copies."""
    masks: list[tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=list)
    """The last masks that were repeated, with the number of repeats and the result."""


_current: ContextVar[_Pass | None] = ContextVar("pass", default=None)
_registering = threading.Lock()
_MASKS_KEPT = 4
"""Number of repeated masks kept: one per layer type, and some to spare."""


def _pass_of(config: PretrainedConfig | None) -> _Pass | None:
    """Return the current pass if it is of a model with this configuration, else None."""
    # Not `is_compiling`, which is true in all threads while one compiles.
    current = None if torch.compiler.is_dynamo_compiling() else _current.get()
    return current if current is not None and current.config is config else None


@dataclass(frozen=True)
class _StandIn:
    """Registered under a name, in place of the function `before`."""

    before: Callable[..., Attended]


class _Grouped(_StandIn):
    """Replaces sdpa: within our passes the queries of one group become more rows over the same keys."""

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **others: Any,
    ) -> Attended:
        """Attend with queries (batch, heads, n, size) to keys and values (batch, key/value heads, length, size)."""
        current = _pass_of(getattr(module, "config", None))
        if current is not None and attention_mask is not None and attention_mask.is_floating_point():
            # Layers may compute in another dtype than that of their weights.
            attention_mask = attention_mask.to(query.dtype)
        if (
            current is None
            or not current.grouped
            or module.training
            or self.before is not sdpa_attention_forward
            or attention_mask is None
            or attention_mask.shape[1] > 1  # one for each head
            or query.shape[1] == key.shape[1]
            or others.get("position_bias") is not None
            or others.get("softcap") is not None
        ):
            return self.before(module, query, key, value, attention_mask, *args, **others)
        batch, heads, n, size = query.shape
        attended = torch.nn.functional.scaled_dot_product_attention(
            query.reshape(batch, key.shape[1], -1, size),
            key,
            value,
            attn_mask=_repeated(attention_mask, query.shape[1] // key.shape[1], current.masks),
            scale=others.get("scaling"),
        )
        return attended.reshape(batch, heads, n, value.shape[-1]).transpose(1, 2).contiguous(), None


class _Masked(_StandIn):
    """Replaces an implementation that does not support tree masks: within our passes by one that does; in a graph, for
    masks that it does not support.
    """

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        *args: Any,
        **others: Any,
    ) -> Attended:
        current, mask, function = _pass_of(getattr(module, "config", None)), attention_mask, self.before
        attention = None if current is None else current.attention
        if current is not None and isinstance(mask, torch.Tensor) and mask.is_floating_point():
            mask = mask.to(query.dtype)
        elif torch.compiler.is_dynamo_compiling() and isinstance(mask, torch.Tensor) and mask.ndim == 4:
            lacking = others.get("softcap") is not None or others.get("s_aux") is not None
            attention = "eager" if lacking else "sdpa"
        if attention == "eager":
            function = sys.modules[type(module).__module__].eager_attention_forward
        elif attention is not None:
            function = AttentionInterface()[attention]
        return function(module, query, key, value, mask, *args, **others)


@dataclass(frozen=True)
class _Masks:
    """Registered under a name, in place of the function `before` that made its masks, if there was one."""

    before: Callable[..., Any] | None

    def __call__(self, *args: Any, **options: Any) -> Any:
        current = _pass_of(options.get("config"))
        if current is None:
            return self.before(*args, **options) if self.before is not None else None
        # Always a mask: layers that are compiled one by one select their attention by it.
        return AttentionMaskInterface()[current.attention](*args, **{**options, "allow_is_causal_skip": False})


def _repeated(mask: torch.Tensor, times: int, copies: list[tuple[torch.Tensor, int, torch.Tensor]]) -> torch.Tensor:
    """Return the mask with its rows repeated `times` times; it is computed in the first layer of a pass and reused by
    others. Layers on several devices each get a copy, of which only the last ones are kept.
    """
    for original, repeats, repeated in copies:
        if original is mask and repeats == times:
            return repeated
    copies.append((mask, times, mask.repeat(1, 1, times, 1)))
    del copies[:-_MASKS_KEPT]
    return copies[-1][2]


def stand_in(config: PretrainedConfig, attention: str, grouped: bool) -> frozenset[str]:
    """Replace the functions registered under the names by which a model's passes find their attention; return these
    names. See `attending`.
    """
    configured = attention_name(config)
    if configured == attention and not (grouped and configured == "sdpa"):
        return frozenset()
    names = frozenset({configured, attention} - {"eager"})
    with _registering:
        for name in names:
            before = AttentionInterface().get(name)
            if before is not None and not isinstance(before, _StandIn):
                AttentionInterface.register(name, _Grouped(before) if name == "sdpa" else _Masked(before))
            makes_masks = AttentionMaskInterface().get(name)
            if name != "sdpa" and not isinstance(makes_masks, _Masks):
                AttentionMaskInterface.register(name, _Masks(makes_masks))
    return names


def still_registered(names: frozenset[str]) -> bool:
    """Return whether ours are still registered under these names, and not functions of another library."""
    functions, makers = AttentionInterface(), AttentionMaskInterface()
    return all(isinstance(functions.get(name), (_StandIn, NoneType)) for name in names) and all(
        isinstance(makers.get(name), _Masks) for name in names - {"sdpa"}
    )


@contextmanager
def attending(config: PretrainedConfig, attention: str, grouped: bool) -> Iterator[None]:
    """Within the block, this thread's passes of a model with this configuration attend with `attention`, sdpa or eager;
    with `grouped`, sdpa makes no copies of shared heads. `stand_in` must have been called for them.
    """
    token = _current.set(_Pass(config, attention, grouped))
    try:
        yield
    finally:
        _current.reset(token)
