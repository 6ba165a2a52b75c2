"""A key/value cache that can keep chosen slots: the accepted path of a tree stays, the rest is forgotten.

A tree forward appends one slot per node. Of these only the accepted ones may stay, moved together at the end of the text. All layers of
one shape share one preallocated tensor, so that keeping a path is two operations for the whole model instead of four for each layer, and
nothing of the text before it is copied. Room grows by doubling.

`TreeCache` takes over the layers of a `DynamicCache` in place; afterwards that cache works wherever it did before, in plain `generate` too.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from transformers.cache_utils import Cache, DynamicLayer

_GRAIN = 128


class _Store:
    """Keys and values of all layers of one shape: (tensors, batch, heads, capacity, size), tensors being keys and values in turn."""

    def __init__(self, shape: torch.Size, tensors: int, like: torch.Tensor, capacity: int) -> None:
        batch, heads, _, size = shape
        self.buffer = like.new_empty(tensors, batch, heads, capacity, size)

    @property
    def capacity(self) -> int:
        return self.buffer.shape[3]

    def reserve(self, slots: int) -> None:
        """Room for `slots` slots in every layer, by doubling."""
        if slots > self.capacity:
            tensors, batch, heads, old, size = self.buffer.shape
            grown = self.buffer.new_empty(tensors, batch, heads, max(2 * old, _rounded(slots)), size)
            grown[:, :, :, :old] = self.buffer
            self.buffer = grown


class TreeLayer(DynamicLayer):
    """One layer's share of the stores; a `DynamicLayer` for everybody else."""

    def __init__(self, stores: tuple[_Store, _Store], places: tuple[int, int], length: int) -> None:
        self.stores, self.places, self.length = stores, places, length
        super().__init__()
        self.dtype, self.device = stores[0].buffer.dtype, stores[0].buffer.device
        self.is_initialized = True

    def _view(self, which: int) -> torch.Tensor:
        return self.stores[which].buffer[self.places[which], :, :, : self.length]

    def _replace(self, which: int, value: torch.Tensor | None) -> None:
        """Somebody reordered, repeated or selected rows: the result becomes a store of its own."""
        if value is None:
            return
        store = _Store(value.shape, 1, value, _rounded(value.shape[-2]))
        store.buffer[0, :, :, : value.shape[-2]] = value
        self.stores = (store, self.stores[1]) if which == 0 else (self.stores[0], store)
        self.places = (0, self.places[1]) if which == 0 else (self.places[0], 0)
        self.length = value.shape[-2]

    keys = property(lambda self: self._view(0), lambda self, value: self._replace(0, value))
    values = property(lambda self: self._view(1), lambda self, value: self._replace(1, value))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends states (batch, heads, n, size) and returns views of all slots."""
        start, self.length = self.length, self.length + key_states.shape[-2]
        for store, place, states in zip(self.stores, self.places, (key_states, value_states), strict=True):
            store.reserve(self.length)
            store.buffer[place, :, :, start : self.length] = states
        return self._view(0), self._view(1)

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` slots, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"expected a number of slots to forget of 0 or less, got {tokens_to_remove}")
        self.length += tokens_to_remove

    def reset(self) -> None:
        self.length = 0


class TreeCache:
    """Keeps accepted slots in a `DynamicCache`, whose layers it takes over when there is first something to keep."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._stores: list[_Store] = []

    def keep(self, start: int, nodes: list[int]) -> None:
        """Of the slots from `start` on, one a node, keeps those of `nodes` (ascending), moved together, and forgets the rest."""
        if not self._stores:
            if not all(type(layer) is TreeLayer for layer in self.cache.layers):
                _take_over(self.cache)
            self._stores = list({id(store): store for layer in self.cache.layers for store in layer.stores}.values())
        moved = next((place for place, node in enumerate(nodes) if place != node), len(nodes))
        if moved < len(nodes):
            for store in self._stores:
                slots = torch.tensor(nodes[moved:], device=store.buffer.device) + start
                store.buffer[:, :, :, start + moved : start + len(nodes)] = store.buffer.index_select(3, slots)
        for layer in self.cache.layers:
            layer.length = start + len(nodes)


def _take_over(cache: Cache) -> None:
    """Moves all states into shared stores, one for all keys and values of one shape, with room for as much again."""
    places: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
    for index, layer in enumerate(cache.layers):
        for which, states in enumerate((layer.keys, layer.values)):
            places[states.shape, states.dtype, states.device].append((index, which))
    found: dict[tuple[int, int], tuple[_Store, int]] = {}
    for (shape, _, _), members in places.items():
        for place, (index, which) in enumerate(members):
            states = cache.layers[index].values if which else cache.layers[index].keys
            if place == 0:
                store = _Store(shape, len(members), states, _rounded(2 * shape[-2]))
            store.buffer[place, :, :, : shape[-2]] = states
            found[index, which] = (store, place)
    length = cache.get_seq_length()
    for index in range(len(cache.layers)):
        (keys, key_place), (values, value_place) = found[index, 0], found[index, 1]
        cache.layers[index] = TreeLayer((keys, values), (key_place, value_place), length)


def _rounded(slots: int) -> int:
    return -(-slots // _GRAIN) * _GRAIN
