"""transformers' key/value caches, made such that chosen slots can be kept, and which of them can be.

A tree forward appends one slot per node. Of these only the accepted ones may stay, moved together at the end of the
text; of states over the text that of the last one (`recurrence`). Layers of a `DynamicCache` give way to those of
`cache_layers`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .._util.device import synchronize
from .cache_layers import (
    BlockTreeLayer,
    IndexedTreeLayer,
    KeptSlots,
    OffloadedTreeLayer,
    RecurrentTreeLayer,
    SlotStore,
    TokenCount,
    TreeLayer,
    roll,
    take_states,
)
from .compat import (
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from .recurrence import joined_states, recurrent_layers, select_states, take_over_states
from .remembered import lasting

_SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_OTHERS = (*_SLIDING, DynamicLayer, DynamicIndexedLayer, DummyLayer, LinearAttentionAndFullAttentionLayer)
_TAKEN = (TreeLayer, OffloadedTreeLayer, IndexedTreeLayer, BlockTreeLayer, RecurrentTreeLayer, TokenCount)


class TreeCache(KeptSlots):
    """Keeps accepted slots in a `DynamicCache`, whose layers it takes over as soon as there is something in them.
    Afterwards the cache works wherever it did before, in plain `generate` too.
    """

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        if cache.get_seq_length():
            self._take_over()

    @lasting()
    def _take_over(self) -> None:
        if self._stores:
            return
        _share(self.cache)
        self._layers = [layer for layer in self.cache.layers if hasattr(layer, "parts")]
        self._indexed = [layer for layer in self._layers if hasattr(layer, "move")]
        self._stores = list({id(store): store for layer in self._layers for store, _ in layer.parts}.values())

    @classmethod
    def of_length(cls, cache: Cache, slots: int) -> TreeCache:
        """Of a cache whose layers were taken over and have room for `slots` slots, which are yet to be written."""
        for layer in cache.layers:
            if hasattr(layer, "parts"):
                layer.length = slots
            if getattr(layer, "indexer_keys", None) is not None:
                layer.indexer_keys = layer.indexer_keys.new_empty(1, slots, layer.indexer_keys.shape[2])
        return cls(cache)

    @property
    def stores(self) -> list[SlotStore]:
        """The tensors that its layers share."""
        return self._stores

    def parts(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """What it holds of slots of one text, as views: keys and values, (tensors, heads, n, size) for every store, and
        index keys, (n, size) for every layer that has some.
        """
        states = [store.buffer[:, row, :, first:last] for store in self._stores]
        keys = [layer.indexer_keys for layer in self._indexed if layer.indexer_keys is not None]
        return [*states, *(key[row, first:last] for key in keys)]

    @lasting()
    def shift(self, places: Sequence[int], slots: int) -> None:
        """Move each text by `places[row]` slots, to the right if positive, behind zeros; there are `slots` then."""
        self._take_over()
        touched = max(slots, self.cache.get_seq_length())
        for store in self._stores:
            store.reserve(touched)
            for row, distance in enumerate(places):
                roll(store.buffer.select(1, row).narrow(2, 0, touched), distance)
        for layer in self._indexed:
            layer.shift(places, touched)
        self._cut(slots)

    @lasting()
    def join(self, other: TreeCache) -> None:
        """Append the texts of another cache of the same model. Slots that a text does not have hold zeros, as what is
        masked must still be numbers. An error leaves both caches as they were.
        """
        self._take_over()
        other._take_over()
        held, joining = self.cache.get_seq_length(), other.cache.get_seq_length()
        pairs = zip(self._stores, other._stores, strict=True)
        texts = [store.append(more, held, joining) for store, more in pairs]
        states = joined_states(self.cache, other.cache)
        # From here on nothing is allocated or computed.
        for store, number in zip(self._stores, texts, strict=True):
            store.resize(number)
        for kept, joined in states:
            kept.update(joined)
        self._cut(max(held, joining))

    @lasting()
    def take(self, other: TreeCache, sequences: int, slots: int) -> None:
        """Hold the first slots of the first sequences of another cache of the same model, whatever was there."""
        for own, given in zip(self._stores, other._stores, strict=True):
            own.reserve(slots)
            own.buffer[:, :sequences, :, :slots] = given.buffer[:, :sequences, :, :slots]

    @lasting()
    def select(self, rows: Sequence[int], slots: int) -> None:
        """Keep these texts alone, in this order, with `slots` slots; a text may only move to the place of one that
        goes.
        """
        self._take_over()
        for store in self._stores:
            for place, row in enumerate(rows):
                if place != row:
                    store.buffer[:, place, :, :slots] = store.buffer[:, row, :, :slots]
            store.resize(len(rows))
        select_states(self.cache, rows)
        self._cut(slots)


def unsupported_cache(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in this cache, or None if they can."""
    if type(cache) is not DynamicCache:
        return f"expected a DynamicCache, got {type(cache).__name__}"
    others = sorted(
        {type(layer).__name__ for layer in cache.layers if not (type(layer) in _TAKEN or can_be_taken(layer))}
    )
    if others:
        return f"expected a cache of full-attention layers, got {', '.join(others)}"
    states = recurrent_layers(cache)
    if states and cache.offloading:
        return "expected an offloaded cache of keys and values alone, got one with states over the text"
    if any(layer.record_past for layer in states):
        return (
            "expected a cache that keeps the newest states, got one that records those before (activate_past_recording)"
        )
    read = any(any(layer.has_previous_state.values()) for layer in states)
    if read and not _attends(cache):
        return "expected an empty cache or one that was made here, got states that do not say how many tokens they read"
    if cache.offloading and any(
        isinstance(layer, DynamicIndexedLayer) or attends_to_blocks(layer) for layer in cache.layers
    ):
        return "expected an offloaded cache of keys and values alone, got one with index keys (sparse attention)"
    return None


def can_be_taken(layer: object) -> bool:
    """Whether it is a layer of transformers of which accepted slots and states can be kept."""
    return type(layer) in (*_OTHERS, LinearAttentionLayer) or attends_to_blocks(layer)


def attends_to_blocks(layer: Any) -> bool:
    """Whether it is MiniMax M3's own layer, whose class is in the module of that model alone."""
    return type(layer).__name__ == "MiniMaxM3VLSparseCacheLayer"


def unroll(cache: Cache) -> None:
    """Let sliding layers keep everything from now on. What leaves the window is masked, so that the cache works
    wherever it did before; but a tree's slots are not in order of position, and dropping the oldest is not right. Zeros
    fill the slots that a layer has dropped before: no later token has them in its window.
    """
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, _SLIDING):
            full = DynamicLayer()
            if type(layer) is not DynamicSlidingWindowLayer:
                full = LinearAttentionAndFullAttentionLayer(layer.number_of_states)
                take_states(full, layer)
            if layer.is_initialized:
                _wait_for_copies(cache)
                dropped = layer.cumulative_length - layer.keys.shape[-2]
                full.update(*(pad(states, (0, 0, dropped, 0)) for states in (layer.keys, layer.values)))
                full.device = layer.device  # the states of an offloaded layer lie elsewhere
            cache.layers[place] = full
    take_over_states(cache)
    if not _attends(cache):
        cache.layers.append(TokenCount())


def slots(cache: Cache) -> int:
    """Return how many tokens a cache holds; 0 for one of states alone that were not counted."""
    return int(cache.get_seq_length()) if _attends(cache) else 0


def _attends(cache: Cache) -> bool:
    """Whether it has layers with slots, or a count of what they would be."""
    return not cache.layers or any(isinstance(layer, CacheLayerMixin) for layer in cache.layers)


def stop_counting(cache: Cache) -> None:
    """Remove the count of tokens, before a cache is given back to its owner."""
    if isinstance(cache.layers[-1], TokenCount):
        cache.layers.pop()


def count(cache: Cache, tokens: int) -> None:
    """Count tokens that were read, where no layer has slots that show it."""
    if cache.layers and isinstance(cache.layers[-1], TokenCount):
        cache.layers[-1].length += tokens


def _share(cache: Cache) -> None:
    """Move all states into shared stores, one for all keys and values of one shape, with room for as much again. A
    layer that shares the states of another stays as it is.
    """
    holders = [index for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    if not any(can_be_taken(cache.layers[index]) for index in holders):
        return
    unroll(cache)
    _wait_for_copies(cache)
    alike: dict[tuple, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
    for index in holders:
        for part, states in enumerate((cache.layers[index].keys, cache.layers[index].values)):
            device = None if cache.offloading else states.device
            alike[states.shape, states.dtype, device].append((index, part, states))
    found: dict[tuple[int, int], tuple[SlotStore, int]] = {}
    for (shape, _, _), members in alike.items():
        store = SlotStore(shape, len(members), members[0][2], on_host=cache.offloading)
        for place, (index, part, states) in enumerate(members):
            store.buffer[place, :, :, : shape[-2]] = states
            found[index, part] = store, place
    for index in holders:
        before = cache.layers[index]
        shared = (found[index, 0], found[index, 1], before.keys.shape[-2], before.device)
        layer: TreeLayer
        if isinstance(before, LinearAttentionLayer):
            layer = RecurrentTreeLayer(*shared, states=before)
        elif attends_to_blocks(before):
            layer = BlockTreeLayer(*shared)
            layer.update_index(before.idx_keys)
        elif isinstance(before, DynamicIndexedLayer):
            layer = IndexedTreeLayer(*shared)
            if before.indexer_keys is not None:
                layer.update_indexer(before.indexer_keys)
        else:
            layer = OffloadedTreeLayer(*shared) if cache.offloading else TreeLayer(*shared)
        cache.layers[index] = layer


def _wait_for_copies(cache: Cache) -> None:
    """An offloaded cache copies states to and fro while the host goes on."""
    devices = {layer.device for layer in cache.layers if layer.keys is not None} if cache.offloading else ()
    for device in devices:
        synchronize(device)
