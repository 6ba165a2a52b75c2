"""Caches passed to a call: whether decoding can continue in one, and its contents after the call.

`take_over` and `give_back` convert between the cache of a call and the one that decoding uses. Decoding keeps the slots
of every sequence from slot 0 on, in a `DynamicCache`. `generate` pads shorter sequences on the left, so that all end in
one slot, and a static cache has all its slots from the start. A cache that is not new is read before the first step. If
the caller will see it, it is filled after the last step as plain decoding would have left it.

Cost: a copy of the cache at either end, two for a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache, PretrainedConfig, QuantizedCache, StaticCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..model.architectures import LengthThreshold
from ..model.compat import (
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
    OwnLayer,
    StaticIndexedLayer,
)
from ..model.info import ModelInfo
from ..model.kv_cache import (
    TreeCache,
    attends_to_blocks,
    can_be_taken,
    window_of,
)
from ..model.target import Target
from ..model.tree_layer import OffloadedTreeLayer, TreeLayer

_STATIC = (StaticLayer, StaticSlidingWindowLayer, StaticIndexedLayer, DummyLayer)


def why_not(cache: Cache, target: Target, batch: int, length: int, most: int) -> str | None:
    """Return why a call of a model with this cache cannot be accelerated, or None. The call reads `batch` sequences of
    `length` tokens, padding included, of which the first ones are cached, and may fill `most` slots.
    """
    if not hasattr(cache, "layers"):  # one of several caches, for an encoder and a decoder
        return f"{type(cache).__name__} is unsupported; use a DynamicCache"
    info, keys = target.info, [keys for keys in map(_keys_of, cache.layers) if keys is not None]
    cached = int(cache.get_seq_length()) if _counts_tokens(cache) else 0
    if cached >= length:
        return f"the cache must hold fewer than the {length} tokens given, got {cached}; pass all tokens so far"
    if keys and len(keys[0]) != batch:
        return f"the cache must hold as many sequences as are given, {batch}, got {len(keys[0])}"
    # Keys of another dtype change the cache when they are added.
    if cached and (converted := {states.dtype for states in keys} - {target.dtype}):
        return f"the cache must hold keys of {target.dtype}, got {', '.join(map(str, converted))}"
    if info.recurrent and type(cache) is StaticCache:
        return f"a static cache is unsupported for {info.name}, which has recurrent states; use a dynamic one"
    if info.counts_slots and type(cache) is StaticCache:
        return f"a static cache is unsupported for {info.name}, which counts empty slots as tokens; use a dynamic one"
    if info.recurrent and cached and batch > 1:
        return f"a batch with {info.name} needs an empty cache, got one of {cached} tokens"
    if reason := info.why_not_read_on(cached, length):
        return reason
    if isinstance(cache, QuantizedCache):
        return "QuantizedCache is unsupported: it cannot roll back rejected tokens"
    reason = (
        _why_not_static(cache, most, info.length_threshold) if type(cache) is StaticCache else _why_not_dynamic(cache)
    )
    return reason or _why_not_windows(cache, most, info)


def _counts_tokens(cache: Cache) -> bool:
    """Return whether a cache has layers with slots, or can count tokens without them."""
    return not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def _keys_of(layer: Any) -> torch.Tensor | None:
    """Return the keys of a layer, for inspection."""
    if isinstance(layer, TreeLayer):
        return layer.states()[0] if layer.buffers else None
    return getattr(layer, "keys", None)


def _why_not_windows(cache: Cache, most: int, info: ModelInfo) -> str | None:
    """Return why a cache that drops tokens, such as one made for another model, lacks some that this model needs."""
    for layer, (_, window, _) in zip(cache.layers, info.cache_layout, strict=False):  # either may have fewer layers
        sliding = isinstance(layer, StaticSlidingWindowLayer)
        kept = layer.max_cache_len if sliding else window_of(layer)
        if 0 < kept < min(most, window or most):
            return f"the cache keeps {kept} tokens, but {info.name} attends to {window or 'all'}; pass one made for it"
    return None


def _why_not_static(cache: StaticCache, most: int, threshold: LengthThreshold | None) -> str | None:
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in _STATIC})
    if others:
        return f"layers of a static cache are unsupported: {', '.join(others)}"
    indexed = any(type(layer) is StaticIndexedLayer for layer in cache.layers)
    if indexed and threshold is not None and most > threshold.at:
        return f"a static cache is supported for up to {threshold.at} tokens, got {most + 1}: {threshold.why}"
    if cache.offloading and indexed:
        return "an offloaded cache with index keys (sparse attention) is unsupported"
    for layer in cache.layers:
        sliding = isinstance(layer, StaticSlidingWindowLayer)
        if isinstance(layer, StaticLayer) and not sliding and layer.max_cache_len < most:
            return (
                f"the static cache must have room for {most} tokens, got {layer.max_cache_len}; make a longer one or "
                "ask for fewer tokens"
            )
    return None


def _why_not_dynamic(cache: Cache) -> str | None:
    """Return why accepted slots cannot be kept in the layers of a cache, or None."""
    if type(cache) is not DynamicCache:
        return f"{type(cache).__name__} is unsupported; use a DynamicCache"
    to_come = cache.layer_class_to_replicate
    if to_come not in (None, DynamicLayer, TreeLayer, OffloadedTreeLayer):
        name = getattr(to_come, "__name__", type(to_come).__name__)
        return f"cache layers {name}, which the cache makes as it is filled, are unsupported"
    others = {
        type(layer).__name__
        for layer in cache.layers
        if not (isinstance(layer, (TreeLayer, OwnLayer)) or can_be_taken(layer))
    }
    if others:
        return f"cache layers {', '.join(sorted(others))} are unsupported: they cannot roll back rejected tokens"
    if reason := _why_not_equal([layer for layer in cache.layers if isinstance(layer, DynamicLayer)]):
        return reason
    states = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if states and cache.offloading:
        return "an offloaded cache with recurrent states is unsupported"
    if any(getattr(layer, "record_past", False) for layer in cache.layers):
        return "a cache that records earlier states (activate_past_recording) is unsupported"
    read = any(any(layer.has_previous_state.values()) for layer in states)
    if read and not _counts_tokens(cache):
        return "the cache holds recurrent states of an unknown number of tokens; pass an empty cache"
    if cache.offloading and any(
        isinstance(layer, DynamicIndexedLayer) or attends_to_blocks(layer) for layer in cache.layers
    ):
        return "an offloaded cache with index keys (sparse attention) is unsupported"
    return None


def _why_not_equal(layers: Sequence[DynamicLayer]) -> str | None:
    """Return why layers with keys do not hold the same tokens, as in a compressed cache, or None if they do."""
    if len({*map(id, layers)}) < len(layers):
        return "the cache contains the same layer object several times; use separate layers"
    if len({layer.get_seq_length() for layer in layers}) > 1 or any(map(_lacks_slots, layers)):
        return "the layers of the cache hold different numbers of tokens"
    return None


def _lacks_slots(layer: DynamicLayer) -> bool:
    """Return whether a transformers layer with a window holds keys other than those of the window's last tokens."""
    if not isinstance(layer, DynamicSlidingWindowLayer) or layer.keys is None:
        return False
    kept = layer.sliding_window - 1 or layer.cumulative_length
    return int(layer.keys.shape[-2]) != min(layer.cumulative_length, kept)


def take_over(given: Cache, paddings: Sequence[int], config: PretrainedConfig) -> tuple[TreeCache, list[int]]:
    """Return the cache that decoding uses, with the slots of every sequence from slot 0 on, and how many it holds of
    each. `paddings[row]`: number of padding columns before each sequence; `config`: that of the text decoder.
    """
    cache = TreeCache(given) if type(given) is DynamicCache else _read(given, config)
    cached = cache.length
    lengths = [max(0, cached - padding) for padding in paddings]
    if cached and any(paddings):
        cache.shift([-min(padding, cached) for padding in paddings], lengths)
    return cache, lengths


def give_back(cache: TreeCache, given: Cache, paddings: Sequence[int], columns: int) -> None:
    """Leave the given cache as plain decoding would: all `columns` except the last, zeros for padding."""
    if any(paddings) or len(paddings) > 1:
        cache.shift(paddings, [columns - 1] * len(paddings))
    if cache.cache is not given:
        _write(cache, given)
    if cache.states is not None:
        cache.states.release(given)
    if cache.cache is given:
        cache.release()


def _read(static: Cache, config: PretrainedConfig) -> TreeCache:
    """Return a dynamic cache with copies of the slots of a static one, except those that windows have dropped."""
    cache = TreeCache(DynamicCache(config=config, offloading=static.offloading))
    cached = int(static.get_seq_length())
    for index, layer in enumerate(static.layers if cached else ()):
        if layer.keys is None:
            continue
        dropped = max(0, cached - layer.keys.shape[2])
        copies = [states[:, :, : cached - dropped].to(layer.device) for states in (layer.keys, layer.values)]
        cache.cache.layers[index].load(*copies, dropped)
        if isinstance(layer, StaticIndexedLayer) and layer.is_indexer_initialized:
            cache.cache.update_indexer(layer.indexer_keys[:, :cached].clone(), index)
    return cache


def _write(cache: TreeCache, static: Cache) -> None:
    """Append to a static cache the slots that it does not have yet."""
    cached = int(static.get_seq_length())
    for index, layer in enumerate(cache.cache.layers):
        if layer.keys is None:
            continue
        start = layer.starts[0]  # zeros stand for slots that a window has dropped
        states = [states[:, :, max(0, cached - start) :].to(layer.device) for states in layer.states()]
        static.update(*(pad(slots, (0, 0, max(0, start - cached), 0)) for slots in states), index)
        indexer_keys = getattr(layer, "indexer_keys", None)
        if indexer_keys is not None:
            static.update_indexer(indexer_keys[:, cached:], index)
