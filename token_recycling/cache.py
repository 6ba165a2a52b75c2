"""A key/value cache that can keep chosen slots: the accepted path of a tree stays, the rest is forgotten.

A tree forward appends one slot per node. Of these only the accepted ones may stay, moved together at the end of the
text. All layers of one shape share one preallocated tensor, so that moving a slot is one operation for the whole
model instead of two for each layer, and nothing of the text before it is copied. Room grows by doubling.

`TreeCache` takes over the layers of a `DynamicCache` in place; afterwards that cache works wherever it did before, in
plain `generate` too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

_GRAIN = 128


class _Store:
    """Keys and values of all layers of one shape, in turn: (tensors, batch, heads, capacity, size)."""

    def __init__(self, shape: torch.Size, tensors: int, like: torch.Tensor) -> None:
        """Room for twice the slots of `shape` (batch, heads, slots, size)."""
        batch, heads, slots, size = shape
        self._set(like.new_empty(tensors, batch, heads, _rounded(2 * slots), size))

    def _set(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.tensors = buffer.unbind()

    def reserve(self, slots: int) -> None:
        """Room for `slots` slots in every layer, by doubling."""
        tensors, batch, heads, capacity, size = self.buffer.shape
        if slots > capacity:
            grown = self.buffer.new_empty(tensors, batch, heads, max(2 * capacity, _rounded(slots)), size)
            grown[:, :, :, :capacity] = self.buffer
            self._set(grown)


class TreeLayer(DynamicLayer):
    """One layer's share of the stores; a `DynamicLayer` for everybody else."""

    def __init__(self, keys: tuple[_Store, int], values: tuple[_Store, int], length: int) -> None:
        """`keys` and `values`: a store and the place of this layer's tensor in it."""
        self.parts, self.length = [keys, values], length
        super().__init__()
        self.dtype, self.device = keys[0].buffer.dtype, keys[0].buffer.device
        self.is_initialized = True

    def _view(self, part: int) -> torch.Tensor:
        store, place = self.parts[part]
        return store.tensors[place].narrow(2, 0, self.length)

    def _replace(self, part: int, states: torch.Tensor | None) -> None:
        """Somebody reordered, repeated or selected rows: the result becomes a store of its own."""
        if states is None:
            return
        store = _Store(states.shape, 1, states)
        self.length = states.shape[-2]
        store.buffer[0, :, :, : self.length] = states
        self.parts[part] = (store, 0)

    keys = property(lambda self: self._view(0), lambda self, states: self._replace(0, states))
    values = property(lambda self: self._view(1), lambda self, states: self._replace(1, states))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states (batch, heads, n, size) and returns views of all slots."""
        if not self.length and self._view(0).shape[:2] != key_states.shape[:2]:
            # Emptied, and used again for another number of texts.
            self._replace(0, key_states)
            self._replace(1, value_states)
            return self._view(0), self._view(1)
        start, n = self.length, key_states.shape[-2]
        self.length += n
        for (store, place), states in zip(self.parts, (key_states, value_states), strict=True):
            store.reserve(self.length)
            store.tensors[place].narrow(2, start, n).copy_(states)
        return self._view(0), self._view(1)

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` slots, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a number of slots to forget of 0 or less, got {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        self.length = 0


class IndexedTreeLayer(TreeLayer, DynamicIndexedLayer):
    """A layer of a model with sparse attention, which keeps index keys (batch, slots, size) besides."""

    indexer_keys: torch.Tensor | None

    def move(self, row: int, source: int, place: int) -> None:
        """Copies the index key of one slot onto another."""
        if self.indexer_keys is not None:
            self.indexer_keys[row, place] = self.indexer_keys[row, source]

    def keep(self, slots: int) -> None:
        """Forgets all index keys but the first."""
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


_TAKEN = (TreeLayer, IndexedTreeLayer)
_OTHERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)


def unsupported_layers(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in the layers of a cache, or None if they can."""
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in (*_TAKEN, *_OTHERS)})
    if others:
        return f"expected a cache of full-attention layers, got {', '.join(others)}"
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer and layer.is_initialized:
            held = layer.keys.shape[-2]
            if held < layer.cumulative_length:
                return (
                    f"expected a cache with all {layer.cumulative_length} tokens, got one whose sliding layers have "
                    f"dropped all but {held}; start a new one"
                )
    return None


def unroll(cache: Cache) -> None:
    """Lets sliding layers keep everything from now on. What leaves the window is masked, so that the cache works
    wherever it did before; but a tree's slots are not in order of position, and dropping the oldest is not right.
    """
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            full = DynamicLayer()
            if layer.is_initialized:
                full.update(layer.keys, layer.values)
            cache.layers[place] = full


class TreeCache:
    """Keeps accepted slots in a `DynamicCache`, whose layers it takes over: at once if there is something in them, else
    when there is something to keep.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._stores: list[_Store] = []
        self._layers: list[TreeLayer] = []
        if cache.get_seq_length():
            self._take_over()

    def _take_over(self) -> None:
        if any(type(layer) in _OTHERS and layer.keys is not None for layer in self.cache.layers):
            _share(self.cache)
        self._layers = [layer for layer in self.cache.layers if type(layer) in _TAKEN]
        self._stores = list({id(store): store for layer in self._layers for store, _ in layer.parts}.values())

    def keep(self, held: int, lengths: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Of the slots from `held` on, one a node, keeps those of the `accepted` nodes (ascending) of each text, moved
        to the end of its `lengths[row]` slots, and forgets the rest.
        """
        if not self._stores:
            self._take_over()
        indexed = [layer for layer in self._layers if isinstance(layer, IndexedTreeLayer)]
        # A slot only moves towards the text, onto one that has moved or is forgotten: no copy reads what another wrote.
        for row, (length, nodes) in enumerate(zip(lengths, accepted, strict=True)):
            for place, node in enumerate(nodes):
                if length + place != held + node:
                    for store in self._stores:
                        slots = store.buffer.narrow(1, row, 1)
                        slots.narrow(3, length + place, 1).copy_(slots.narrow(3, held + node, 1))
                    for layer in indexed:
                        layer.move(row, held + node, length + place)
        longest = max(length + len(nodes) for length, nodes in zip(lengths, accepted, strict=True))
        for layer in self._layers:
            layer.length = longest
        for layer in indexed:
            layer.keep(longest)


def _share(cache: Cache) -> None:
    """Moves all states into shared stores, one for all keys and values of one shape, with room for as much again.

    A layer without states of its own, which shares those of another, stays as it is.
    """
    unroll(cache)
    holders = [index for index, layer in enumerate(cache.layers) if layer.keys is not None]
    places: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for index in holders:
        for part in (0, 1):
            states = _states(cache, index, part)
            places[states.shape, states.dtype, states.device].append((index, part))
    found: dict[tuple[int, int], tuple[_Store, int]] = {}
    for (shape, _, _), members in places.items():
        store = _Store(shape, len(members), _states(cache, *members[0]))
        for place, member in enumerate(members):
            store.buffer[place, :, :, : shape[-2]] = _states(cache, *member)
            found[member] = (store, place)
    for index in holders:
        before = cache.layers[index]
        indexed = isinstance(before, DynamicIndexedLayer)
        layer = (IndexedTreeLayer if indexed else TreeLayer)(found[index, 0], found[index, 1], before.keys.shape[-2])
        if indexed:
            layer.indexer_keys, layer.is_indexer_initialized = before.indexer_keys, before.is_indexer_initialized
        cache.layers[index] = layer


def _states(cache: Cache, index: int, part: int) -> torch.Tensor:
    return (cache.layers[index].keys, cache.layers[index].values)[part]


def _rounded(slots: int) -> int:
    return -(-slots // _GRAIN) * _GRAIN
