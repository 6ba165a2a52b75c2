"""Attention for forward passes over trees, in place of the implementation that a model's configuration names.

It differs from a model's own attention in two ways. With grouped-query attention and a mask, transformers copies the
keys and values of the whole context for every query head. Here the queries of one group become more rows over the same
keys: the same sums, and a tree step costs up to a seventh less. And implementations that do not take any mask (flash,
flex) are replaced by one that does.

A configuration is shared by all threads, so it is never changed. Instead the functions registered with transformers
under a name are wrapped by ones that look at a context variable: outside of our forward passes, and for any other
model, they call the original. A compiler cannot look there: in its graphs `sdpa` attends as registered, and other
implementations attend as `sdpa` does if they are given a mask of four dimensions.
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
    """Settings of attention for the passes of one model."""

    config: PretrainedConfig
    attention: str
    """sdpa or eager."""
    grouped: bool
    """Whether the queries of one group stand side by side."""
    masks: list[tuple[torch.Tensor, int, torch.Tensor]] = field(default_factory=list)
    """The last masks that were repeated, how often, and the result."""


_current: ContextVar[_Pass | None] = ContextVar("pass", default=None)
_registering = threading.Lock()
_MASKS_KEPT = 4
"""One for each type of layer, and some."""


def _pass_of(config: PretrainedConfig | None) -> _Pass | None:
    """The pass within which a model of this configuration attends, as far as can be seen."""
    # Not `is_compiling`, which says so in all threads while one compiles.
    current = None if torch.compiler.is_dynamo_compiling() else _current.get()
    return current if current is not None and current.config is config else None


@dataclass(frozen=True)
class _StandIn:
    """Is registered for a name, in place of the function that was `before`."""

    before: Callable[..., Attended]


class _Grouped(_StandIn):
    """In place of sdpa: within our passes the queries of one group become more rows over the same keys."""

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
        """Attention of queries (batch, heads, n, size) on keys and values (batch, key/value heads, length, size)."""
        current = _pass_of(getattr(module, "config", None))
        if current is not None and attention_mask is not None and attention_mask.is_floating_point():
            # Layers may compute in another type than their weights are stored in.
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
    """In place of an implementation that takes no mask of a tree: within our passes one that takes any; in a graph,
    for a mask that could not be taken otherwise.
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
    """Is registered for a name, in place of what made its masks `before`, if anything did."""

    before: Callable[..., Any] | None

    def __call__(self, *args: Any, **options: Any) -> Any:
        current = _pass_of(options.get("config"))
        if current is None:
            return self.before(*args, **options) if self.before is not None else None
        # Always a mask: layers that are compiled one by one know by it what to do.
        return AttentionMaskInterface()[current.attention](*args, **{**options, "allow_is_causal_skip": False})


def _repeated(mask: torch.Tensor, times: int, copies: list[tuple[torch.Tensor, int, torch.Tensor]]) -> torch.Tensor:
    """The mask with its rows `times` times over; made in the first layer of a pass, kept for the others. Where layers
    lie on several devices each is given a copy, of which only the last ones are kept.
    """
    for original, repeats, repeated in copies:
        if original is mask and repeats == times:
            return repeated
    copies.append((mask, times, mask.repeat(1, 1, times, 1)))
    del copies[:-_MASKS_KEPT]
    return copies[-1][2]


def stand_in(config: PretrainedConfig, attention: str, grouped: bool) -> frozenset[str]:
    """Put ours in place of what is registered for the names by which a model's passes find their attention, see
    `attending`; return these names.
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


def stands_in(names: frozenset[str]) -> bool:
    """Whether ours is still registered for these names, rather than what another library has put there since."""
    functions, makers = AttentionInterface(), AttentionMaskInterface()
    return all(isinstance(functions.get(name), (_StandIn, NoneType)) for name in names) and all(
        isinstance(makers.get(name), _Masks) for name in names - {"sdpa"}
    )


@contextmanager
def attending(config: PretrainedConfig, attention: str, grouped: bool) -> Iterator[None]:
    """For the length of the block, this thread's passes of a model with this configuration attend with `attention`,
    sdpa or eager; `grouped` sdpa does so without copies of shared heads. `stand_in` was called for them.
    """
    token = _current.set(_Pass(config, attention, grouped))
    try:
        yield
    finally:
        _current.reset(token)
