"""KV cache of a tree: slots of keys and values, and which of them are kept after a step.

Verifying n nodes appends n slots. Those of accepted nodes move to the end of the sequence, all others are dropped; of
recurrent states, the one after the last accepted node is kept (`recurrence`). A `TreeCache` replaces the layers of a
cache by layers that support this (`tree_layer`). They work wherever transformers' own do, also in plain `generate`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from .._util.device import outside_inference_mode, synchronize
from .compat import (
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from .tree_layer import (
    WINDOW_NODES,
    Frame,
    OffloadedTreeLayer,
    TreeLayer,
    capacity,
    window_band,
    window_start,
)

if TYPE_CHECKING:
    from .recurrence import RecurrentStates

Accepted = Sequence[Sequence[int]]
"""The accepted nodes of each sequence, ascending; empty for a sequence that keeps nothing."""
Slots = list[list[torch.Tensor]]
"""Some slots of one sequence, by layer: keys and values (heads, n, size), and index keys (n, size) if it has them;
empty for a layer without slots.
"""

CacheLayout = tuple[tuple[type, int, bool], ...]
"""The layers of a cache: see `layout_of`."""

_OTHERS = (
    DummyLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
"""Layers without slots, or with states, which `recurrence` takes over."""


class TreeCache:
    """Slots and states of sequences, in the layers of a transformers cache."""

    @outside_inference_mode
    def __init__(self, cache: Cache) -> None:
        """Replace the cache's own layers by tree layers with the same slots. Slots that a sliding layer has dropped
        stay dropped. The cache still works wherever it did before.
        """
        self.cache = cache
        """The cache object that the model receives."""
        if cache.layer_class_to_replicate is DynamicLayer:
            cache.layer_class_to_replicate = OffloadedTreeLayer if cache.offloading else TreeLayer
        if cache.offloading:
            _wait_for_copies(cache)
        for index, layer in enumerate(cache.layers):
            replacement = _replacement_of(layer)
            if replacement is TreeLayer and cache.offloading:
                replacement = OffloadedTreeLayer
            if replacement is not None:
                cache.layers[index] = own = replacement(layer.sliding_window if layer.is_sliding else 0)
                if layer.is_initialized:
                    own.take_over(layer)
            elif isinstance(layer, TreeLayer):
                layer.own()
        self.states: RecurrentStates | None = None
        """Recurrent states, if the model has any."""
        if any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
            from .recurrence import RecurrentStates

            self.states = RecurrentStates(cache)
        self.windowed = next((layer for layer in self.layers if layer.window), None)
        """The first layer that drops slots, None if there is none; all such layers of a cache drop alike."""

    @property
    def layers(self) -> list[TreeLayer]:
        """The layers that store slots."""
        return [layer for layer in self.cache.layers if isinstance(layer, TreeLayer)]

    @property
    def filled(self) -> list[TreeLayer]:
        """The layers that hold slots, or did before."""
        return [layer for layer in self.cache.layers if isinstance(layer, TreeLayer) and layer.buffers]

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.cache.get_seq_length())

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return max((layer.rows for layer in self.filled), default=0)

    @property
    def starts(self) -> list[int]:
        """By sequence, how many slots layers with a window have dropped; empty if none drops any."""
        return [] if self.windowed is None else self.windowed.starts

    @property
    def takes_frames(self) -> bool:
        """Whether all layers that hold slots are plain `TreeLayer`s on one device, that of the slots of a frame."""
        filled = self.filled
        return all(type(layer) is TreeLayer for layer in filled) and len({layer.device for layer in filled}) == 1

    # Before and during a pass

    def expect(self, length: int) -> None:
        """Make the first allocation large enough for `length` tokens of each sequence; call it before a prefill."""
        columns = capacity(length)
        for layer in self.layers:
            if not layer.buffers and not layer.window:
                layer.reserved = layer.reserved[0], max(columns, layer.reserved[1])

    def drop_unseen(self, length: int) -> None:
        """Let layers with a window drop slots unseen after `length` tokens; call it before a pass over text."""
        for layer in self.layers:
            if layer.window:
                layer.first_needed = window_start(length, layer.window)

    def settle(self, lengths: Sequence[int]) -> bool:
        """Drop the slots before the windows of sequences of these lengths, if a prompt was read and nothing kept since;
        call it before a pass in a frame. Return whether exactly these are dropped, since a frame counts from there:
        layers of transformers have dropped more.
        """
        windowed = self.windowed
        if windowed is None:
            return True
        starts = [window_start(length, windowed.window) for length in lengths]
        if windowed.starts != starts:
            for layer in self.filled:
                layer.settle(lengths)
        return windowed.starts == starts

    @contextmanager
    def framed(self, frame: Frame) -> Iterator[None]:
        """Within the block, forward passes write to a frame and attend within it."""
        layers = self.filled
        for layer in layers:
            layer.frame = frame
        try:
            yield
        finally:
            for layer in layers:
                layer.frame = None

    # After a pass

    @outside_inference_mode
    def keep(self, roots: int | Sequence[int], lengths: Sequence[int], accepted: Accepted) -> None:
        """Keep the slots of the `accepted` nodes (ascending) of each sequence, which move to the end of its
        `lengths[row]` slots; all other slots after those are dropped. Node i is in slot `roots` + i, after the slots of
        all sequences, or, in a frame, in slot `roots[row]` + i.
        """
        lengths_after = list(map(add, lengths, map(len, accepted)))
        if self.states is not None:
            self.states.keep([nodes[-1] if nodes else None for nodes in accepted])
            self.states.counter.length = max(lengths_after)
        moves: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        """By the values they depend on, which most layers share."""
        for layer in self.filled:
            key = layer.length - layer.columns, *layer.starts, layer.buffers[0].device
            if key not in moves:
                moves[key] = _moves(layer, roots, lengths, accepted)
            if moves[key]:
                layer.move(*moves[key])
            layer.settle(lengths_after)

    def wipe(self, lengths: Sequence[int]) -> None:
        """Write zeros to all slots after the first `lengths[row]` of each sequence: masked slots must hold numbers."""
        for layer in self.filled:
            layer.wipe(lengths)

    def crop(self, slots: int) -> None:
        """Discard all slots from number `slots` on."""
        for layer in self.filled:
            layer.cut(slots)

    def release(self) -> None:
        """Restore layers of transformers, if there are some of that kind, before the cache returns to its owner:
        callers and other libraries may use those in any way.
        """
        if self.cache.layer_class_to_replicate is TreeLayer:
            self.cache.layer_class_to_replicate = DynamicLayer
        for layer in self.layers:
            layer.release()

    # Capacity

    def reserve(self, rows: int, columns: int, nodes: int = WINDOW_NODES) -> None:
        """Ensure capacity for this many sequences and slots; with a window, for those it needs and `nodes` nodes."""
        for layer in self.layers:
            most = min(columns, window_band(layer.window, nodes)) if layer.window else columns
            if layer.buffers:
                layer.reserve(rows, most, exactly=True)
            else:
                layer.reserved = rows, most

    def addresses(self) -> list[int]:
        """Return the addresses of the buffers."""
        return [buffer.data_ptr() for layer in self.filled for buffer in layer.buffers]

    def keep_all(self) -> None:
        """Disable dropping of slots in all layers of an empty cache, whatever their windows."""
        for layer in self.layers:
            layer.window = 0
        self.windowed = None

    # Sequences that come and go

    def slice(self, row: int, first: int, last: int) -> Slots:
        """Return views of some slots of one sequence, none of which was dropped."""
        return [layer.slice(row, first, last) if isinstance(layer, TreeLayer) else [] for layer in self.cache.layers]

    def append(self, slots: Slots) -> None:
        """Append slots of one sequence, from `slice`."""
        for layer, states in zip(self.cache.layers, slots, strict=True):
            if states:
                layer.append(states)

    @outside_inference_mode
    def shift(self, distances: Sequence[int], lengths: Sequence[int]) -> None:
        """Move each sequence by `distances[row]` slots, to the right if positive, filling with zeros; it then has
        `lengths[row]`.
        """
        for layer in self.filled:
            layer.shift(distances, lengths)

    @outside_inference_mode
    def join(self, other: TreeCache) -> None:
        """Append the sequence of another cache of the same model. Slots that a sequence lacks hold zeros, since masked
        slots must still be numbers. An error leaves both caches unchanged.
        """
        rows, lengths = self.rows, [other.length]
        self._take(other, rows, lengths)
        states = [] if self.states is None or other.states is None else self.states.joined(other.states)
        # From here on nothing is allocated or computed.
        for own, joined in states:
            own.update(joined)
        self._admit(rows, lengths)
        if self.states is not None:
            self.states.counter.length = max(self.states.counter.length, other.length)

    @outside_inference_mode
    def take(self, other: TreeCache, first: int, lengths: Sequence[int]) -> None:
        """Copy the first `lengths[row]` slots of each sequence of another cache of the same model, as the sequences
        from number `first` on, and overwrite what was there.
        """
        self._take(other, first, lengths)
        self._admit(first, lengths)

    def _take(self, other: TreeCache, first: int, lengths: Sequence[int]) -> None:
        while len(self.cache.layers) < len(other.cache.layers):  # a cache made without a configuration
            self.cache.layers.append(TreeLayer())
        for own, given in zip(self.cache.layers, other.cache.layers, strict=True):
            if isinstance(given, TreeLayer) and given.buffers:
                own.take(given, first, lengths)

    def _admit(self, first: int, lengths: Sequence[int]) -> None:
        for layer in self.filled:
            layer.admit(first, lengths)

    @outside_inference_mode
    def select(self, rows: Sequence[int], slots: int) -> None:
        """Keep only these sequences, in this order, with `slots` slots. One may move to the row of a removed sequence,
        or the first one be copied to all rows.
        """
        for layer in self.filled:
            layer.select(rows, slots)
        if self.states is not None:
            self.states.select(rows)
            self.states.counter.length = slots


def _replacement_of(layer: Any) -> type[TreeLayer] | None:
    """Return the class that replaces a layer of transformers; None for other layers."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return TreeLayer
    if type(layer) is DynamicIndexedLayer or attends_to_blocks(layer):
        from .indexed_layer import BlockTreeLayer, IndexedTreeLayer

        return BlockTreeLayer if attends_to_blocks(layer) else IndexedTreeLayer
    return None


def _wait_for_copies(cache: Cache) -> None:
    """Wait for the copies of an offloaded cache, which run while the host continues."""
    for device in {layer.device for layer in cache.layers if layer.is_initialized and layer.keys is not None}:
        synchronize(device)


def _moves(
    layer: TreeLayer, roots: int | Sequence[int], lengths: Sequence[int], accepted: Accepted
) -> tuple[torch.Tensor, ...]:
    """Return the moves after a pass, for this layer and all that have dropped as many slots, (n,) int64 each: the row,
    column and new column of every slot that moves; empty if all are in place. See `TreeCache.keep`.
    """
    moves = []
    for row, (length, nodes) in enumerate(zip(lengths, accepted, strict=True)):
        dropped = layer.starts[row]
        root = roots - (layer.length - layer.columns) if isinstance(roots, int) else roots[row] - dropped
        for column, node in enumerate(nodes, start=length - dropped):
            if root + node != column:
                moves.append((row, root + node, column))
    return torch.tensor(moves, device=layer.buffers[0].device).unbind(1) if moves else ()


# Layers of transformers


def can_be_taken(layer: object) -> bool:
    """Return whether it is a layer of transformers in which accepted slots and states can be kept."""
    return type(layer) in _OTHERS or _replacement_of(layer) is not None


def attends_to_blocks(layer: object) -> bool:
    """Return whether it is MiniMax M3's own layer, whose class exists only in the module of that model."""
    return type(layer).__name__ == "MiniMaxM3VLSparseCacheLayer"


def window_of(layer: Any) -> int:
    """Return the number of tokens that a layer of a dynamic cache keeps, or 0 if it keeps all."""
    if isinstance(layer, TreeLayer):
        return layer.window
    return layer.sliding_window if getattr(layer, "is_sliding", False) else 0


def layout_of(layers: Sequence[Any]) -> CacheLayout:
    """Return the class of each layer of a cache, its sliding window, 0 if it has none, and whether it was written to,
    if it records that.
    """
    return tuple(
        (type(layer), getattr(layer, "sliding_window", 0), getattr(layer, "is_initialized", False)) for layer in layers
    )
