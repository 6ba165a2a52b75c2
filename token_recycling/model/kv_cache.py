"""A key/value cache that can keep chosen slots: the accepted path of a tree stays, the rest is forgotten.

A tree forward appends one slot per node. Of these only the accepted ones may stay, moved together at the end of the
text. All layers of one shape share one preallocated tensor, so that moving a slot is one operation for the whole
model instead of two for each layer, and nothing of the text before it is copied. Room grows by doubling.

`TreeCache` takes over the layers of a `DynamicCache` in place; afterwards that cache works wherever it did before, in
plain `generate` too. Where the cache is offloaded, the shared tensors lie in the memory of the host: a step copies the
slots of one layer after the other to the device, and only those of its own nodes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

_GRAIN = 128


class _Store:
    """Keys and values of all layers of one shape, in turn: (tensors, batch, heads, capacity, size)."""

    def __init__(self, shape: torch.Size, tensors: int, like: torch.Tensor, on_host: bool = False) -> None:
        """Room for twice the slots of `shape` (batch, heads, slots, size), where `like` is or on the host."""
        batch, heads, slots, size = shape
        self.on_host = on_host
        self._set(self._empty(tensors, batch, heads, _rounded(2 * slots), size, like))

    def _empty(self, tensors: int, batch: int, heads: int, slots: int, size: int, like: torch.Tensor) -> torch.Tensor:
        if not self.on_host:
            return like.new_empty(tensors, batch, heads, slots, size)
        # The heads of a slot lie side by side, so that the slots of one text are one piece to copy to the device.
        pinned = torch.cuda.is_available()
        made = torch.empty(tensors, batch, slots, heads, size, dtype=like.dtype, pin_memory=pinned)
        return made.transpose(2, 3)

    def _set(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.tensors = buffer.unbind()

    def reserve(self, slots: int) -> None:
        """Room for `slots` slots in every layer, by doubling."""
        tensors, batch, heads, capacity, size = self.buffer.shape
        if slots > capacity:
            grown = self._empty(tensors, batch, heads, max(2 * capacity, _rounded(slots)), size, self.buffer)
            grown[:, :, :, :capacity] = self.buffer
            self._set(grown)


class TreeLayer(DynamicLayer):
    """One layer's share of the stores; a `DynamicLayer` for everybody else."""

    def __init__(self, keys: tuple[_Store, int], values: tuple[_Store, int], length: int, device: torch.device) -> None:
        """`keys` and `values`: a store and the place of this layer's tensor in it; `device`: where it attends."""
        self.parts, self.length = [keys, values], length
        super().__init__()
        self.dtype, self.device = keys[0].buffer.dtype, device
        self.is_initialized = True

    def _view(self, part: int) -> torch.Tensor:
        store, place = self.parts[part]
        return store.tensors[place].narrow(2, 0, self.length)

    def _replace(self, part: int, states: torch.Tensor | None) -> None:
        """Somebody reordered, repeated or selected rows: the result becomes a store of its own."""
        if states is None:
            return
        store = _Store(states.shape, 1, states, self.parts[part][0].on_host)
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
            return self._attended(0), self._attended(1)
        start, n = self.length, key_states.shape[-2]
        self.length += n
        for (store, place), states in zip(self.parts, (key_states, value_states), strict=True):
            store.reserve(self.length)
            store.tensors[place].narrow(2, start, n).copy_(states)
        return self._attended(0), self._attended(1)

    def _attended(self, part: int) -> torch.Tensor:
        return self._view(part)

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` slots, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a number of slots to forget of 0 or less, got {tokens_to_remove}")
        self.length = max(0, self.length + tokens_to_remove)

    def reset(self) -> None:
        self.length = 0


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


_TAKEN = (TreeLayer, OffloadedTreeLayer, IndexedTreeLayer)
_OTHERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)


def unsupported_cache(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in this cache, or None if they can."""
    if type(cache) is not DynamicCache:
        return f"expected a DynamicCache, got {type(cache).__name__}"
    return unsupported_layers(cache)


def unsupported_layers(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in the layers of a cache, or None if they can."""
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in (*_TAKEN, *_OTHERS)})
    if others:
        return f"expected a cache of full-attention layers, got {', '.join(others)}"
    if cache.offloading and any(isinstance(layer, DynamicIndexedLayer) for layer in cache.layers):
        return "expected an offloaded cache of keys and values alone, got one with index keys (sparse attention)"
    return None


def unroll(cache: Cache) -> None:
    """Lets sliding layers keep everything from now on. What leaves the window is masked, so that the cache works
    wherever it did before; but a tree's slots are not in order of position, and dropping the oldest is not right.

    Where a layer has dropped tokens before, zeros fill their slots: no later token has them in its window.
    """
    for place, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            full = DynamicLayer()
            if layer.is_initialized:
                _wait_for_copies(cache)
                dropped = layer.cumulative_length - layer.keys.shape[-2]
                full.update(*(pad(states, (0, 0, dropped, 0)) for states in (layer.keys, layer.values)))
                full.device = layer.device  # the states of an offloaded layer lie elsewhere
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
        self._cut(max(length + len(nodes) for length, nodes in zip(lengths, accepted, strict=True)))

    def shift(self, places: Sequence[int], slots: int) -> None:
        """Moves all of each text by `places[row]` slots, to the right if positive, where zeros stand before it; then
        there are `slots` slots.
        """
        if not self._stores:
            self._take_over()
        touched = max(slots, self.cache.get_seq_length())
        for store in self._stores:
            store.reserve(touched)
            for row, distance in enumerate(places):
                _roll(store.buffer.select(1, row).narrow(2, 0, touched), distance)
        for layer in self._layers:
            if isinstance(layer, IndexedTreeLayer) and layer.indexer_keys is not None:
                missing = touched - layer.indexer_keys.shape[1]
                layer.indexer_keys = pad(layer.indexer_keys, (0, 0, 0, missing))
                for row, distance in enumerate(places):
                    _roll(layer.indexer_keys[row], distance)
        self._cut(slots)

    def _cut(self, slots: int) -> None:
        for layer in self._layers:
            layer.length = slots
            if isinstance(layer, IndexedTreeLayer):
                layer.keep(slots)


def _roll(states: torch.Tensor, distance: int) -> None:
    """Moves states (..., slots, size) in place; zeros come in from the left."""
    if distance:
        states.copy_(states.roll(distance, dims=-2))
        states[..., : max(0, distance), :] = 0


def _share(cache: Cache) -> None:
    """Moves all states into shared stores, one for all keys and values of one shape, with room for as much again.

    A layer without states of its own, which shares those of another, stays as it is.
    """
    unroll(cache)
    _wait_for_copies(cache)
    holders = [index for index, layer in enumerate(cache.layers) if layer.keys is not None]
    places: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for index in holders:
        for part in (0, 1):
            states = _states(cache, index, part)
            places[states.shape, states.dtype, None if cache.offloading else states.device].append((index, part))
    found: dict[tuple[int, int], tuple[_Store, int]] = {}
    for (shape, _, _), members in places.items():
        store = _Store(shape, len(members), _states(cache, *members[0]), on_host=cache.offloading)
        for place, member in enumerate(members):
            store.buffer[place, :, :, : shape[-2]] = _states(cache, *member)
            found[member] = (store, place)
    for index in holders:
        before = cache.layers[index]
        indexed = isinstance(before, DynamicIndexedLayer)
        kind = OffloadedTreeLayer if cache.offloading else IndexedTreeLayer if indexed else TreeLayer
        layer = kind(found[index, 0], found[index, 1], before.keys.shape[-2], before.device)
        if indexed:
            layer.indexer_keys, layer.is_indexer_initialized = before.indexer_keys, before.is_indexer_initialized
        cache.layers[index] = layer


def _wait_for_copies(cache: Cache) -> None:
    """An offloaded cache copies states to and fro while the host goes on."""
    devices = {layer.device for layer in cache.layers if layer.keys is not None} if cache.offloading else ()
    for device in devices:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _states(cache: Cache, index: int, part: int) -> torch.Tensor:
    return (cache.layers[index].keys, cache.layers[index].values)[part]


def _rounded(slots: int) -> int:
    return -(-slots // _GRAIN) * _GRAIN
