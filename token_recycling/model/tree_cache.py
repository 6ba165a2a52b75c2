"""A key/value cache that can keep chosen slots: the accepted path of a tree stays, the rest is forgotten.

A tree forward appends one slot per node. Of these only the accepted ones may stay, moved together at the end of the
text; of states over the text that of the last one (`recurrence`). All layers of one shape share one preallocated
tensor, so that moving a slot is one operation for the whole model instead of two for each layer, and nothing of the
text before it is copied. Room grows by doubling. How transformers' caches become such ones is in `kv_cache`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from .compat import left_by_crop
from .recurrence import join_states, keep_states, recurrent_layers, select_states
from .remembered import lasting

_GRAIN = 128


class SlotStore:
    """Keys and values of all layers of one shape, in turn: (tensors, batch, heads, capacity, size)."""

    def __init__(self, shape: torch.Size, tensors: int, like: torch.Tensor, on_host: bool = False) -> None:
        """Room for twice the slots of `shape` (batch, heads, slots, size), where `like` is or on the host."""
        batch, heads, slots, size = shape
        self.on_host = on_host
        self._set(self._empty(tensors, batch, heads, _rounded(2 * slots), size, like))

    @lasting()
    def _empty(self, tensors: int, batch: int, heads: int, slots: int, size: int, like: torch.Tensor) -> torch.Tensor:
        if not self.on_host:
            return like.new_empty(tensors, batch, heads, slots, size)
        # The heads of a slot lie side by side, so that the slots of one text are one piece to copy to the device.
        pinned = torch.cuda.is_available()
        made = torch.empty(tensors, batch, slots, heads, size, dtype=like.dtype, pin_memory=pinned)
        return made.transpose(2, 3)

    @lasting()
    def _set(self, whole: torch.Tensor, texts: int | None = None) -> None:
        self._whole = whole
        """With room for further texts."""
        self.buffer = whole[:, :texts]
        self.tensors = self.buffer.unbind()

    def reserve(self, slots: int) -> None:
        """Room for `slots` slots in every layer, by doubling."""
        tensors, texts, heads, capacity, size = self._whole.shape
        if slots > capacity:
            grown = self._empty(tensors, texts, heads, max(2 * capacity, _rounded(slots)), size, self._whole)
            grown[:, : self.buffer.shape[1], :, :capacity] = self.buffer
            self._set(grown, self.buffer.shape[1])

    def resize(self, texts: int) -> None:
        """For another number of texts, of which the first ones stay: room grows by doubling, and is kept."""
        tensors, room, heads, capacity, size = self._whole.shape
        if texts > room:
            grown = self._empty(tensors, max(2 * room, texts), heads, capacity, size, self._whole)
            grown[:, : self.buffer.shape[1]] = self.buffer
            self._whole = grown
        self._set(self._whole, texts)


class TreeLayer(DynamicLayer):
    """One layer's share of the stores; a `DynamicLayer` for everybody else."""

    def __init__(
        self, keys: tuple[SlotStore, int], values: tuple[SlotStore, int], length: int, device: torch.device
    ) -> None:
        """`keys` and `values`: a store and the place of this layer's tensor in it; `device`: where it attends."""
        self.parts, self.length = [keys, values], length
        super().__init__()
        self.dtype, self.device = keys[0].buffer.dtype, device
        self.is_initialized = True

    def _view(self, part: int) -> torch.Tensor:
        store, place = self.parts[part]
        return store.tensors[place].narrow(2, 0, self.length)

    def _replace(self, part: int, states: torch.Tensor | None) -> None:
        """Put states in a store of its own: somebody reordered, repeated or selected rows."""
        if states is None:
            return
        store = SlotStore(states.shape, 1, states, self.parts[part][0].on_host)
        self.length = states.shape[-2]
        store.buffer[0, :, :, : self.length] = states
        self.parts[part] = (store, 0)

    keys = property(lambda self: self._view(0), lambda self, states: self._replace(0, states))
    values = property(lambda self: self._view(1), lambda self, states: self._replace(1, states))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states (batch, heads, n, size) and return views of all slots."""
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
        """Forget the last `-tokens_to_remove` slots, as in transformers."""
        self.length = left_by_crop(tokens_to_remove, self.length)

    def reset(self) -> None:
        self.length = 0


class TreeCache:
    """Keeps accepted slots in a `DynamicCache`, whose layers it takes over: at once if there is something in them, else
    when there is something to keep. Afterwards the cache works wherever it did before, in plain `generate` too.
    """

    def __init__(self, cache: Cache, share: Callable[[Cache], None]) -> None:
        """Use `kv_cache.tree_cache`, whose `share` makes the cache's layers `TreeLayer`s."""
        self.cache, self._share = cache, share
        self._stores: list[SlotStore] = []
        self._layers: list[Any] = []
        self._indexed: list[Any] = []
        """The layers that keep index keys too."""
        self._recurrent = bool(recurrent_layers(cache))
        if cache.get_seq_length():
            self._take_over()

    @lasting()
    def _take_over(self) -> None:
        self._share(self.cache)
        self._layers = [layer for layer in self.cache.layers if hasattr(layer, "parts")]
        self._indexed = [layer for layer in self._layers if hasattr(layer, "move")]
        self._stores = list({id(store): store for layer in self._layers for store, _ in layer.parts}.values())

    @torch.inference_mode(False)
    @torch.no_grad()
    def keep(self, held: int, lengths: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Of the slots from `held` on, one a node, keep those of the `accepted` nodes (ascending) of each text, moved
        to the end of its `lengths[row]` slots, and forget the rest.
        """
        if self._recurrent:
            keep_states(self.cache, [nodes[-1] if nodes else None for nodes in accepted])
        if not self._stores:
            self._take_over()
        # A slot only moves towards the text, onto one that has moved or is forgotten: no copy reads what another wrote.
        for row, (length, nodes) in enumerate(zip(lengths, accepted, strict=True)):
            for place, node in enumerate(nodes):
                if length + place != held + node:
                    for store in self._stores:
                        slots = store.buffer.narrow(1, row, 1)
                        slots.narrow(3, length + place, 1).copy_(slots.narrow(3, held + node, 1))
                    for layer in self._indexed:
                        layer.move(row, held + node, length + place)
        self._cut(max(length + len(nodes) for length, nodes in zip(lengths, accepted, strict=True)))

    @lasting()
    def shift(self, places: Sequence[int], slots: int) -> None:
        """Move all of each text by `places[row]` slots, to the right if positive, where zeros stand before it; then
        there are `slots` slots.
        """
        if not self._stores:
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
        """Put the texts of another cache of the same model behind these. Slots that one of the texts does not have
        hold zeros: what is masked must still be numbers.
        """
        for cache in (self, other):
            if not cache._stores:
                cache._take_over()
        held, joining = self.cache.get_seq_length(), other.cache.get_seq_length()
        slots = max(held, joining)
        for store, more in zip(self._stores, other._stores, strict=True):
            texts = store.buffer.shape[1]
            store.reserve(slots)
            store.resize(texts + more.buffer.shape[1])
            store.buffer[:, :texts, :, held:slots] = 0
            store.buffer[:, texts:, :, :joining] = more.buffer[..., :joining, :]
            store.buffer[:, texts:, :, joining:slots] = 0
        join_states(self.cache, other.cache)
        self._cut(slots)

    @lasting()
    def select(self, rows: Sequence[int], slots: int) -> None:
        """Keep these texts alone, in this order, with `slots` slots; a text may only move to an earlier place, whose
        text goes.
        """
        if not self._stores:
            self._take_over()
        for store in self._stores:
            for place, row in enumerate(rows):
                if place != row:
                    store.buffer[:, place, :, :slots] = store.buffer[:, row, :, :slots]
            store.resize(len(rows))
        select_states(self.cache, rows)
        self._cut(slots)

    def _cut(self, slots: int) -> None:
        for layer in self._layers:
            layer.length = slots
        for layer in self._indexed:
            layer.keep(slots)


def roll(states: torch.Tensor, distance: int) -> None:
    """Move states (..., slots, size) in place; zeros come in from the left."""
    if distance:
        states.copy_(states.roll(distance, dims=-2))
        states[..., : max(0, distance), :] = 0


def _rounded(slots: int) -> int:
    return -(-slots // _GRAIN) * _GRAIN
