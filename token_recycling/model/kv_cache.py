"""The KV cache of a tree: which slots are kept, and the layers and tensors that hold them.

Verifying n nodes appends n slots. Only those of accepted nodes stay, moved to the end of the sequence; of recurrent
states, that of the last accepted node stays (`recurrence`). `TreeCache` replaces the layers of a `DynamicCache` by
layers that support this.

All layers of one shape share one preallocated tensor, so that moving a slot is one operation for the whole model
instead of two per layer, and earlier slots are not copied. Capacity doubles when it is exceeded. Offloaded layers share
tensors in host memory: a step copies the slots of one layer after another to the device, and only its own nodes back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
    left_by_crop,
)
from .recurrence import joined_states, keep_states, recurrent_layers, select_states, take_over_states
from .remembered import lasting

_GRAIN = 128


class SlotStore:
    """Keys and values of all layers of one shape, in turn: (tensors, batch, heads, capacity, size)."""

    def __init__(self, shape: torch.Size, tensors: int, like: torch.Tensor, on_host: bool = False) -> None:
        """Allocate twice the slots of `shape` (batch, heads, slots, size), on the device of `like` or on the host."""
        batch, heads, slots, size = shape
        self.on_host = on_host
        self._set(self._empty(tensors, batch, heads, _rounded(2 * slots), size, like))

    @lasting()
    def _empty(self, tensors: int, batch: int, heads: int, slots: int, size: int, like: torch.Tensor) -> torch.Tensor:
        if not self.on_host:
            # Passes on an accelerator attend to slots that nothing was written to, masked: zero times NaN is NaN.
            make = like.new_empty if like.device.type == "cpu" else like.new_zeros
            return make(tensors, batch, heads, slots, size)
        # The heads of a slot lie side by side, so that the slots of one sequence are one piece to copy to the device.
        pinned = torch.cuda.is_available()
        made = torch.empty(tensors, batch, slots, heads, size, dtype=like.dtype, pin_memory=pinned)
        return made.transpose(2, 3)

    @lasting()
    def _set(self, whole: torch.Tensor, sequences: int | None = None) -> None:
        self._whole = whole
        """With capacity for further sequences."""
        self.buffer = whole[:, :sequences]
        self.tensors = self.buffer.unbind()

    def reserve(self, slots: int, sequences: int = 0) -> None:
        """Grow the capacity to `slots` slots per layer and `sequences` sequences, each by doubling."""
        tensors, held, heads, capacity, size = self._whole.shape
        if slots > capacity or sequences > held:
            more_sequences = max(2 * held, sequences) if sequences > held else held
            more_slots = max(2 * capacity, _rounded(slots)) if slots > capacity else capacity
            grown = self._empty(tensors, more_sequences, heads, more_slots, size, self._whole)
            shown = self.buffer.shape[1]
            grown[:, :shown, :, :capacity] = self.buffer
            self._set(grown, shown)

    def resize(self, sequences: int) -> None:
        """Hold `sequences` sequences: the first ones stay, and so does the capacity for more."""
        self.reserve(0, sequences)
        self._set(self._whole, sequences)

    def append(self, other: SlotStore, held: int, joining: int) -> int:
        """Write the first `joining` slots of another store's sequences behind this one's sequences, whose slots from
        `held` on become zeros, and zeros after both; return how many sequences there are. They are not among them
        before `resize`.
        """
        slots, sequences, more = max(held, joining), self.buffer.shape[1], other.buffer.shape[1]
        self.reserve(slots, sequences + more)
        self._whole[:, :sequences, :, held:slots] = 0
        self._whole[:, sequences : sequences + more, :, :joining] = other.buffer[..., :joining, :]
        self._whole[:, sequences : sequences + more, :, joining:slots] = 0
        return sequences + more


@dataclass(frozen=True, eq=False)
class Frame:
    """The slots that a forward pass of a fixed shape writes and attends to."""

    places: torch.Tensor
    """(batch, n) int64: the slot of every node."""
    band: int
    """Slots that attention runs over, from the first one on."""


@contextmanager
def framed(cache: Cache, frame: Frame | None) -> Iterator[None]:
    """For the length of the block, forward passes write to and attend within a frame."""
    layers = [layer for layer in cache.layers if isinstance(layer, TreeLayer)] if frame is not None else []
    for layer in layers:
        layer.frame = frame
    try:
        yield
    finally:
        for layer in layers:
            layer.frame = None


def takes_frames(cache: Cache) -> bool:
    """Whether all layers of a cache that have slots are plain `TreeLayer`s on one device: a frame's places are on the
    model's first one.
    """
    holders = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return all(type(layer) is TreeLayer for layer in holders) and len({layer.device for layer in holders}) == 1


class TreeLayer(DynamicLayer):
    """One layer's share of the stores; a `DynamicLayer` for everybody else."""

    frame: Frame | None = None
    """Frame of the current forward pass, if its shape is fixed."""

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
        """Put states in a separate store: transformers reordered, repeated or selected rows."""
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
        """Append states (batch, heads, n, size) and return views of all slots, or of those in the frame's band."""
        if self.frame is not None:
            self.length = self.frame.band
            return self._within(self.frame, 0, key_states), self._within(self.frame, 1, value_states)
        if not self.length and self._view(0).shape[:2] != key_states.shape[:2]:
            # Emptied, and reused for another batch size.
            self._replace(0, key_states)
            self._replace(1, value_states)
        else:
            start, n = self.length, key_states.shape[-2]
            self.length += n
            for (store, place), states in zip(self.parts, (key_states, value_states), strict=True):
                store.reserve(self.length)
                store.tensors[place].narrow(2, start, n).copy_(states)
        return self._attended(0), self._attended(1)

    def _within(self, frame: Frame, part: int, states: torch.Tensor) -> torch.Tensor:
        store, place = self.parts[part]
        store.reserve(frame.band)
        slots = store.tensors[place][: len(states)]
        slots.scatter_(2, frame.places[:, None, :, None].expand_as(states), states)
        return slots.narrow(2, 0, frame.band)

    def _attended(self, part: int) -> torch.Tensor:
        return self._view(part)

    def get_seq_length(self) -> int:
        return self.length

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` slots, as in transformers."""
        self.length = left_by_crop(tokens_to_remove, self.length)

    def reset(self) -> None:
        self.length = 0


class OffloadedTreeLayer(TreeLayer):
    """A layer whose slots lie in the memory of the host, and on the device only while it attends to them."""

    def _attended(self, part: int) -> torch.Tensor:
        # The host waits for this copy, as for that of the new slots, so that nothing is read before it is there.
        return self._view(part).to(self.device)

    def offload(self) -> None:
        """Nothing: every new slot was copied to the host at once."""

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
        """Copy the index key of one slot onto another."""
        if self.indexer_keys is not None:
            self.indexer_keys[row, place] = self.indexer_keys[row, source]

    def shift(self, places: Sequence[int], slots: int) -> None:
        """Move the index keys of each sequence by `places[row]` within the first `slots`; see `TreeCache.shift`."""
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
        """Append index keys (batch, 1, n, size) and return those of all slots, as in transformers."""
        return self.update_indexer(idx_k[:, 0])[:, None]


class RecurrentTreeLayer(TreeLayer, LinearAttentionLayer):
    """A layer with attention and a recurrent state."""

    def __init__(self, *place: Any, states: LinearAttentionLayer) -> None:
        """`place` as of a `TreeLayer`; `states` is the layer that held them."""
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
    """Counts tokens for a model whose layers all keep states and no slots."""

    parts: tuple[()] = ()

    def __init__(self) -> None:
        super().__init__()
        self.length = 0

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Nothing."""

    def update(self, *states: Any, **others: Any) -> Any:
        raise NotImplementedError

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0


def roll(states: torch.Tensor, distance: int) -> None:
    """Move states (..., slots, size) in place; zeros come in from the left."""
    if distance:
        states.copy_(states.roll(distance, dims=-2))
        states[..., : max(0, distance), :] = 0


def _rounded(slots: int) -> int:
    return -(-slots // _GRAIN) * _GRAIN


_SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_OTHERS = (*_SLIDING, DynamicLayer, DynamicIndexedLayer, DummyLayer, LinearAttentionAndFullAttentionLayer)
_TAKEN = (TreeLayer, OffloadedTreeLayer, IndexedTreeLayer, BlockTreeLayer, RecurrentTreeLayer, TokenCount)


class TreeCache:
    """Keeps accepted slots in a `DynamicCache`, whose layers it takes over as soon as there is something in them.
    Afterwards the cache works wherever it did before, in plain `generate` too.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._stores: list[SlotStore] = []
        self._layers: list[Any] = []
        self._indexed: list[Any] = []
        """The layers that keep index keys too."""
        self._recurrent = bool(recurrent_layers(cache))
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

    @torch.inference_mode(False)
    @torch.no_grad()
    def keep(self, held: int | Sequence[int], lengths: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Keep the slots of the `accepted` nodes (ascending) of each sequence: node i is in slot `held` + i, or
        `held[row]` + i, and moves to the end of the sequence's `lengths[row]` slots. All other slots behind those are
        dropped.
        """
        starts = [held] * len(lengths) if isinstance(held, int) else held
        if self._recurrent:
            keep_states(self.cache, [nodes[-1] if nodes else None for nodes in accepted])
        if not self._layers:
            self._take_over()
        # A slot only moves left, onto one that has moved or is forgotten: no copy reads what another wrote.
        for row, (start, length, nodes) in enumerate(zip(starts, lengths, accepted, strict=True)):
            for place, node in enumerate(nodes):
                if length + place != start + node:
                    for store in self._stores:
                        slots = store.buffer.narrow(1, row, 1)
                        slots.narrow(3, length + place, 1).copy_(slots.narrow(3, start + node, 1))
                    for layer in self._indexed:
                        layer.move(row, start + node, length + place)
        self._cut(max(length + len(nodes) for length, nodes in zip(lengths, accepted, strict=True)))

    def _cut(self, slots: int) -> None:
        for layer in self._layers:
            layer.length = slots
        for layer in self._indexed:
            layer.keep(slots)

    @classmethod
    def of_length(cls, cache: Cache, slots: int) -> TreeCache:
        """Wrap a cache whose layers are `TreeLayer`s with capacity for `slots` slots that are yet to be written."""
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
        """Return views of some slots of one sequence: keys and values, (tensors, heads, n, size) for every store, and
        index keys, (n, size) for every layer that has some.
        """
        states = [store.buffer[:, row, :, first:last] for store in self._stores]
        keys = [layer.indexer_keys for layer in self._indexed if layer.indexer_keys is not None]
        return [*states, *(key[row, first:last] for key in keys)]

    @lasting()
    def shift(self, places: Sequence[int], slots: int) -> None:
        """Shift each sequence by `places[row]` slots, to the right if positive, filled with zeros; `slots` are left."""
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
        """Append the sequences of another cache of the same model. Slots that a sequence does not have hold zeros, as
        what is masked must still be numbers. An error leaves both caches as they were.
        """
        self._take_over()
        other._take_over()
        held, joining = self.cache.get_seq_length(), other.cache.get_seq_length()
        pairs = zip(self._stores, other._stores, strict=True)
        sequences = [store.append(more, held, joining) for store, more in pairs]
        states = joined_states(self.cache, other.cache)
        # From here on nothing is allocated or computed.
        for store, number in zip(self._stores, sequences, strict=True):
            store.resize(number)
        for kept, joined in states:
            kept.update(joined)
        self._cut(max(held, joining))

    @lasting()
    def take(self, other: TreeCache, sequences: int, slots: int, first: int = 0) -> None:
        """Hold, from the sequence `first` on, the first slots of the first sequences of another cache of the same
        model, whatever was there. There must be room.
        """
        other._take_over()
        for own, given in zip(self._stores, other._stores, strict=True):
            own.buffer[:, first : first + sequences, :, :slots] = given.buffer[:, :sequences, :, :slots]
        self._cut(max(slots, self.cache.get_seq_length()) if first else slots)

    @lasting()
    def select(self, rows: Sequence[int], slots: int) -> None:
        """Keep these sequences alone, in this order, with `slots` slots; a sequence may only move to the place of one
        that goes.
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
        return f"{type(cache).__name__} is unsupported; use a DynamicCache"
    others = sorted(
        {type(layer).__name__ for layer in cache.layers if not (type(layer) in _TAKEN or can_be_taken(layer))}
    )
    if others:
        return f"cache layers {', '.join(others)} are unsupported: they cannot roll back rejected tokens"
    states = recurrent_layers(cache)
    if states and cache.offloading:
        return "an offloaded cache with recurrent states is unsupported"
    if any(layer.record_past for layer in states):
        return "a cache that records earlier states (activate_past_recording) is unsupported"
    read = any(any(layer.has_previous_state.values()) for layer in states)
    if read and not _attends(cache):
        return (
            "the cache holds recurrent states of an unknown number of tokens; pass an empty cache or one returned by "
            "an accelerated call"
        )
    if cache.offloading and any(
        isinstance(layer, DynamicIndexedLayer) or attends_to_blocks(layer) for layer in cache.layers
    ):
        return "an offloaded cache with index keys (sparse attention) is unsupported"
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
    """Wait for the copies of an offloaded cache, which run while the host continues."""
    devices = {layer.device for layer in cache.layers if layer.keys is not None} if cache.offloading else ()
    for device in devices:
        synchronize(device)
