"""transformers' key/value caches, made such that chosen slots can be kept (`tree_cache`), and which of them can be.

Besides layers that attend to everything there are offloaded ones, whose shared tensors lie in the memory of the host: a
step copies the slots of one layer after the other to the device, and only those of its own nodes back. Others keep
index keys, or states over the text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .._util.device import synchronize
from .compat import (
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
    OwnLayer,
)
from .recurrence import recurrent_layers, take_over_states
from .remembered import lasting
from .tree_cache import SlotStore, TreeCache, TreeLayer, roll

_SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_OTHERS = (*_SLIDING, DynamicLayer, DynamicIndexedLayer, DummyLayer, LinearAttentionAndFullAttentionLayer)


class OffloadedTreeLayer(TreeLayer):
    """A layer whose slots lie in the memory of the host, and on the device only while it attends to them."""

    def _attended(self, part: int) -> torch.Tensor:
        # The host waits for this copy, as for that of the new slots, so that nothing is read before it is there.
        return self._view(part).to(self.device)

    def offload(self) -> None:
        """Nothing is left to do: every new slot was copied to the host at once."""

    def prefetch(self) -> None:
        """Nothing: one layer at a time is on the device."""


class IndexedTreeLayer(TreeLayer, DynamicIndexedLayer):
    """A layer of a model with sparse attention, which keeps index keys (batch, slots, size) besides."""

    indexer_keys: torch.Tensor | None

    @lasting()
    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """As in transformers."""
        return super().update_indexer(indexer_key_states)

    def move(self, row: int, source: int, place: int) -> None:
        """Copies the index key of one slot onto another."""
        if self.indexer_keys is not None:
            self.indexer_keys[row, place] = self.indexer_keys[row, source]

    def shift(self, places: Sequence[int], slots: int) -> None:
        """Move the index keys of each text by `places[row]` within the first `slots`; see `TreeCache.shift`."""
        if self.indexer_keys is not None:
            self.indexer_keys = pad(self.indexer_keys, (0, 0, 0, slots - self.indexer_keys.shape[1]))
            for row, distance in enumerate(places):
                roll(self.indexer_keys[row], distance)

    def keep(self, slots: int) -> None:
        """Forget all index keys but the first."""
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, :slots]

    def crop(self, tokens_to_remove: int) -> None:
        """As in transformers."""
        super().crop(tokens_to_remove)
        if self.indexer_keys is not None:
            self.indexer_keys = self.indexer_keys[:, : self.length]

    def reset(self) -> None:
        super().reset()
        self.indexer_keys, self.is_indexer_initialized = None, False


class BlockTreeLayer(IndexedTreeLayer):
    """A layer of MiniMax M3, which attends to blocks of keys, and chooses them by one index key (1, size) a slot."""

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Appends index keys (batch, 1, n, size) and returns those of all slots, as in transformers."""
        return self.update_indexer(idx_k[:, 0])[:, None]


def attends_to_blocks(layer: Any) -> bool:
    """Whether it is MiniMax M3's own layer, whose class is in the module of that model alone."""
    return type(layer).__name__ == "MiniMaxM3VLSparseCacheLayer"


class RecurrentTreeLayer(TreeLayer, LinearAttentionLayer):
    """A layer that attends and keeps a state over the text as well."""

    def __init__(self, *place: Any, states: LinearAttentionLayer) -> None:
        """`place`: as of a `TreeLayer`; `states`: the layer that held them."""
        LinearAttentionLayer.__init__(self, states.number_of_states)
        take_states(self, states)
        TreeLayer.__init__(self, *place)

    def lazy_initialization(self, *keys: Any, **states: Any) -> None:
        """Initialize a state; keys and values have a place from the start."""
        LinearAttentionLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        TreeLayer.reset(self)
        LinearAttentionLayer.reset(self)


def take_states(layer: LinearAttentionLayer, states: LinearAttentionLayer) -> None:
    """Let `layer` hold what `states`, a layer of as many states, holds of them."""
    for name in vars(LinearAttentionLayer(states.number_of_states)):
        setattr(layer, name, getattr(states, name))


class TokenCount(OwnLayer):
    """Beside layers that keep nothing but states: how many tokens they have read."""

    parts: tuple[()] = ()

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing."""

    def update(self, *states: Any, **others: Any) -> Any:
        """Nothing attends to it."""
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Sizes as of a layer with a slot for every token."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0


_TAKEN = (TreeLayer, OffloadedTreeLayer, IndexedTreeLayer, BlockTreeLayer, RecurrentTreeLayer, TokenCount)


def unsupported_cache(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in this cache, or None if they can."""
    if type(cache) is not DynamicCache:
        return f"expected a DynamicCache, got {type(cache).__name__}"
    return unsupported_layers(cache)


def unsupported_layers(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in the layers of a cache, or None if they can."""
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


def unroll(cache: Cache) -> None:
    """Let sliding layers keep everything from now on. What leaves the window is masked, so that the cache works
    wherever it did before; but a tree's slots are not in order of position, and dropping the oldest is not right.

    Where a layer has dropped tokens before, zeros fill their slots: no later token has them in its window. States over
    the text are made ready to be kept by node.
    """
    for place, layer in enumerate(cache.layers):
        if isinstance(layer, _SLIDING):
            full = DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else _with_states_of(layer)
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


def tree_cache(cache: Cache) -> TreeCache:
    """Return what keeps chosen slots in a cache, and takes over its layers in place."""
    return TreeCache(cache, _share)


def _share(cache: Cache) -> None:
    """Move all states into shared stores, one for all keys and values of one shape, with room for as much again.

    A layer without states of its own, which shares those of another, stays as it is.
    """
    if not any(can_be_taken(layer) and getattr(layer, "keys", None) is not None for layer in cache.layers):
        return
    unroll(cache)
    _wait_for_copies(cache)
    holders = [index for index, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    places: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for index in holders:
        for part in (0, 1):
            states = _states(cache, index, part)
            places[states.shape, states.dtype, None if cache.offloading else states.device].append((index, part))
    found: dict[tuple[int, int], tuple[SlotStore, int]] = {}
    for (shape, _, _), members in places.items():
        store = SlotStore(shape, len(members), _states(cache, *members[0]), on_host=cache.offloading)
        for place, member in enumerate(members):
            store.buffer[place, :, :, : shape[-2]] = _states(cache, *member)
            found[member] = (store, place)
    for index in holders:
        before = cache.layers[index]
        shared = (found[index, 0], found[index, 1], before.keys.shape[-2], before.device)
        indexed = isinstance(before, DynamicIndexedLayer)
        kind = OffloadedTreeLayer if cache.offloading else IndexedTreeLayer if indexed else TreeLayer
        kind = BlockTreeLayer if attends_to_blocks(before) else kind
        stateful = isinstance(before, LinearAttentionLayer)
        layer = RecurrentTreeLayer(*shared, states=before) if stateful else kind(*shared)
        if kind is BlockTreeLayer:
            layer.update_index(before.idx_keys)
        if indexed:
            layer.indexer_keys, layer.is_indexer_initialized = before.indexer_keys, before.is_indexer_initialized
            if before.indexer_keys is not None and before.indexer_keys.is_inference():
                layer.indexer_keys = before.indexer_keys.clone()
        cache.layers[index] = layer


def _with_states_of(layer: LinearAttentionLayer) -> LinearAttentionAndFullAttentionLayer:
    """A layer that has these states, and attends to everything."""
    full = LinearAttentionAndFullAttentionLayer(layer.number_of_states)
    names = vars(LinearAttentionLayer(layer.number_of_states))
    vars(full).update({name: vars(layer)[name] for name in names})
    return full


def _wait_for_copies(cache: Cache) -> None:
    """An offloaded cache copies states to and fro while the host goes on."""
    devices = {layer.device for layer in cache.layers if layer.keys is not None} if cache.offloading else ()
    for device in devices:
        synchronize(device)


def _states(cache: Cache, index: int, part: int) -> torch.Tensor:
    return (cache.layers[index].keys, cache.layers[index].values)[part]
