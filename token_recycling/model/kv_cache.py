"""The KV cache of a tree: slots of keys and values, and which of them stay after a step.

Verifying n nodes appends n slots. Those of accepted nodes move to the end of the sequence, all others are dropped; of
recurrent states, that of the last accepted node stays (`recurrence`). `take_over` replaces the layers of a cache by
layers that support this (`tree_layer`). They work wherever transformers' own do, in plain `generate` too.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .._util.device import lasting, synchronize
from .compat import (
    DummyLayer,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from .recurrence import (
    RecurrentTreeLayer,
    TokenCount,
    joined_states,
    keep_states,
    recurrent_layers,
    select_states,
    take_over_states,
)
from .tree_layer import (
    WINDOW_NODES,
    BlockTreeLayer,
    Frame,
    IndexedTreeLayer,
    OffloadedTreeLayer,
    TreeLayer,
    window_band,
    window_start,
)

Accepted = Sequence[Sequence[int]]
"""The accepted nodes of each sequence, ascending; none where it keeps nothing."""
Slots = list[list[torch.Tensor]]
"""Some slots of one sequence, by layer: keys and values (heads, n, size), and index keys (n, size) where it has them;
nothing for a layer without slots.
"""

_SLIDING = (DynamicSlidingWindowLayer, LinearAttentionAndSlidingWindowAttentionLayer)
_REPLACEMENTS: dict[type, type[TreeLayer] | None] = {
    DynamicLayer: TreeLayer,
    DynamicSlidingWindowLayer: TreeLayer,
    DynamicIndexedLayer: IndexedTreeLayer,
    LinearAttentionAndFullAttentionLayer: RecurrentTreeLayer,
    LinearAttentionAndSlidingWindowAttentionLayer: RecurrentTreeLayer,
    LinearAttentionLayer: None,
    DummyLayer: None,
}
"""By layer of transformers of which slots and states can be kept, the one that takes its place; None where it has no
slots and stays.
"""
_OWN = (TreeLayer, OffloadedTreeLayer, IndexedTreeLayer, BlockTreeLayer, RecurrentTreeLayer, TokenCount)


def tree_layers(cache: Cache) -> Iterator[TreeLayer]:
    """Yield the layers of a cache that hold slots."""
    for layer in cache.layers:
        if isinstance(layer, TreeLayer) and layer.buffers:
            yield layer


def windowed_layer(cache: Cache) -> TreeLayer | None:
    """Return the first layer that drops slots, as all such layers of a cache do alike; None if there is none."""
    for layer in cache.layers:
        if isinstance(layer, TreeLayer) and layer.drops:
            return layer
    return None


@contextmanager
def framed(cache: Cache, frame: Frame) -> Iterator[None]:
    """For the length of the block, forward passes write to and attend within a frame."""
    layers = list(tree_layers(cache))
    for layer in layers:
        layer.frame = frame
    try:
        yield
    finally:
        for layer in layers:
            layer.frame = None


def takes_frames(cache: Cache) -> bool:
    """Whether all layers of a cache that have slots are plain `TreeLayer`s on one device: a frame's slots are on the
    model's first one.
    """
    holders = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return all(type(layer) is TreeLayer for layer in holders) and len({layer.device for layer in holders}) == 1


def _moves(
    layer: TreeLayer, roots: int | Sequence[int], lengths: Sequence[int], accepted: Accepted
) -> tuple[torch.Tensor, ...]:
    """Return the moves after a pass, for this layer and all that have dropped as many slots, (n,) int64 each: the row
    of every slot that moves, its column, and the one that it goes to. Nothing where all are in place; see
    `TreeCache.keep`.
    """
    moves = []
    for row, (length, nodes) in enumerate(zip(lengths, accepted, strict=True)):
        dropped = layer.starts[row]
        root = roots - (layer.length - layer.columns) if isinstance(roots, int) else roots[row] - dropped
        for column, node in enumerate(nodes, start=length - dropped):
            if root + node != column:
                moves.append((row, root + node, column))
    return torch.tensor(moves, device=layer.buffers[0].device).unbind(1) if moves else ()


class TreeCache:
    """Keeps accepted slots in a cache, whose layers it takes over: see `take_over`."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        take_over(cache)
        self._recurrent = bool(recurrent_layers(cache))

    @torch.inference_mode(False)
    @torch.no_grad()
    def keep(self, roots: int | Sequence[int], lengths: Sequence[int], accepted: Accepted) -> None:
        """Keep the slots of the `accepted` nodes (ascending) of each sequence, which move to the end of its
        `lengths[row]` slots; all others behind those are dropped. Node i is in slot `roots` + i, behind the slots of
        all sequences, or in a frame in slot `roots[row]` + i.
        """
        kept = list(map(add, lengths, map(len, accepted)))
        if self._recurrent:
            keep_states(self.cache, [nodes[-1] if nodes else None for nodes in accepted])
            count_tokens(self.cache, max(kept))
        moves: dict[Hashable, tuple[torch.Tensor, ...]] = {}
        """By what they depend on, which most layers share."""
        for layer in tree_layers(self.cache):
            key = layer.length - layer.columns, *layer.starts, layer.buffers[0].device
            if key not in moves:
                moves[key] = _moves(layer, roots, lengths, accepted)
            if moves[key]:
                layer.move(*moves[key])
            layer.settle(kept)

    def settle(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` slots of each sequence, and drop those before windows."""
        for layer in tree_layers(self.cache):
            layer.settle(lengths)
        count_tokens(self.cache, max(lengths))

    @property
    def starts(self) -> list[int]:
        """By sequence, the slots that layers with a window have dropped; empty where none drops any."""
        layer = windowed_layer(self.cache)
        return [] if layer is None else layer.starts

    def reserve(self, rows: int, columns: int, nodes: int = WINDOW_NODES) -> bool:
        """Have capacity for so many sequences and slots, in windows for what they need of them and so many nodes;
        return whether buffers moved.
        """
        moved = False
        for layer in self.cache.layers:
            if isinstance(layer, TreeLayer):
                most = min(columns, window_band(layer.window, nodes)) if layer.drops else columns
                if layer.buffers:
                    moved = layer.reserve(rows, most, exactly=True) or moved
                else:
                    layer.reserved = rows, most
        return moved

    def addresses(self) -> list[int]:
        """Return where the buffers lie."""
        return [buffer.data_ptr() for layer in tree_layers(self.cache) for buffer in layer.buffers]

    def slice(self, row: int, first: int, last: int) -> Slots:
        """Return views of some slots of one sequence, none of which was dropped."""
        return [layer.slice(row, first, last) if isinstance(layer, TreeLayer) else [] for layer in self.cache.layers]

    def append(self, slots: Slots) -> None:
        """Append slots of one sequence, from `slice`."""
        for layer, states in zip(self.cache.layers, slots, strict=True):
            if states:
                layer.append(states)

    @lasting()
    def shift(self, distances: Sequence[int], lengths: Sequence[int]) -> None:
        """Move each sequence by `distances[row]` slots, to the right if positive, filled with zeros; afterwards it has
        `lengths[row]`.
        """
        for layer in tree_layers(self.cache):
            layer.shift(distances, lengths)

    @lasting()
    def join(self, other: TreeCache) -> None:
        """Append the sequence of another cache of the same model. Slots that a sequence does not have hold zeros, as
        what is masked must still be numbers. An error leaves both caches as they were.
        """
        rows, lengths = self.rows, [other.cache.get_seq_length()]
        self._take(other, rows, lengths)
        states = joined_states(self.cache, other.cache)
        # From here on nothing is allocated or computed.
        for kept, joined in states:
            kept.update(joined)
        self._admit(rows, lengths)

    @lasting()
    def take(self, other: TreeCache, first: int, lengths: Sequence[int]) -> None:
        """Hold, from the sequence `first` on, the first `lengths[row]` slots of each sequence of another cache of the
        same model, whatever was there.
        """
        self._take(other, first, lengths)
        self._admit(first, lengths)

    def _take(self, other: TreeCache, first: int, lengths: Sequence[int]) -> None:
        while len(self.cache.layers) < len(other.cache.layers):  # made without a configuration
            self.cache.layers.append(TreeLayer())
        for own, given in zip(self.cache.layers, other.cache.layers, strict=True):
            if isinstance(given, TreeLayer) and given.buffers:
                own.take(given, first, lengths)

    def _admit(self, first: int, lengths: Sequence[int]) -> None:
        for layer in tree_layers(self.cache):
            layer.admit(first, lengths)

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return max((layer.rows for layer in tree_layers(self.cache)), default=0)

    @lasting()
    def select(self, rows: Sequence[int], slots: int) -> None:
        """Keep these sequences alone, in this order, with `slots` slots; a sequence may only move to the row of one
        that goes.
        """
        for layer in tree_layers(self.cache):
            layer.select(rows, slots)
        select_states(self.cache, rows)
        count_tokens(self.cache, slots)


def why_not_cache(cache: Cache) -> str | None:
    """Why accepted slots cannot be kept in this cache, or None if they can."""
    if type(cache) is not DynamicCache:
        return f"{type(cache).__name__} is unsupported; use a DynamicCache"
    others = sorted(
        {type(layer).__name__ for layer in cache.layers if not (type(layer) in _OWN or can_be_taken(layer))}
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
    return type(layer) in _REPLACEMENTS or attends_to_blocks(layer)


def attends_to_blocks(layer: Any) -> bool:
    """Whether it is MiniMax M3's own layer, whose class is in the module of that model alone."""
    return type(layer).__name__ == "MiniMaxM3VLSparseCacheLayer"


@lasting()
def take_over(cache: Cache) -> None:
    """Replace the layers of a cache by `TreeLayer`s with their slots, and let it count the tokens of a model that has
    states alone. What a sliding layer has dropped stays dropped. Afterwards the cache works wherever it did before.
    """
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = OffloadedTreeLayer if cache.offloading else TreeLayer
    for index, layer in enumerate(cache.layers):
        if can_be_taken(layer):
            replacement = _tree_layer(layer, cache.offloading)
            if replacement is not None and layer.is_initialized and layer.keys is not None:
                _wait_for_copies(cache)
                _fill(replacement, layer)
            cache.layers[index] = layer if replacement is None else replacement
    if recurrent_layers(cache):
        take_over_states(cache)
    if not _attends(cache):
        cache.layers.append(TokenCount())


def _tree_layer(layer: Any, offloaded: bool) -> TreeLayer | None:
    """An empty layer in place of one of transformers'; None where it has no slots."""
    kind = BlockTreeLayer if attends_to_blocks(layer) else _REPLACEMENTS[type(layer)]
    window = layer.sliding_window if isinstance(layer, _SLIDING) else 0
    if kind is RecurrentTreeLayer:
        return RecurrentTreeLayer(window, layer)
    if kind is TreeLayer:
        return OffloadedTreeLayer(window) if offloaded else TreeLayer(window)
    return None if kind is None else kind()


def _fill(replacement: TreeLayer, layer: Any) -> None:
    """Give a layer the slots of the one that it replaces."""
    dropped = layer.cumulative_length - layer.keys.shape[2] if replacement.window else 0
    replacement.load(layer.keys, layer.values, dropped)
    replacement.device = layer.device  # the states of an offloaded layer lie elsewhere
    if isinstance(replacement, BlockTreeLayer):
        replacement.update_index(layer.idx_keys)
    elif isinstance(replacement, IndexedTreeLayer) and layer.indexer_keys is not None:
        replacement.update_indexer(layer.indexer_keys)


def keep_all(cache: Cache) -> None:
    """Let no layer of an empty cache drop slots, whatever its window."""
    for layer in cache.layers:
        if isinstance(layer, TreeLayer):
            layer.drops = False


def expect(cache: Cache, length: int) -> None:
    """Before sequences are read: capacity for `length` tokens of each is made at once."""
    for layer in cache.layers:
        if isinstance(layer, TreeLayer):
            layer.expect(length)


def let_go(cache: Cache, length: int) -> None:
    """Before a pass that reads text: let layers with a window drop what is unseen after `length` tokens."""
    for layer in cache.layers:
        if isinstance(layer, TreeLayer) and layer.drops:
            layer.first_needed = window_start(length, layer.window)


def slots(cache: Cache) -> int:
    """Return how many tokens a cache holds; 0 for one of states alone that were not counted."""
    return int(cache.get_seq_length()) if _attends(cache) else 0


def rows(cache: Cache) -> int | None:
    """Return how many sequences a cache has keys of, or None if it has no keys yet."""
    keys = (getattr(layer, "keys", None) for layer in cache.layers)
    return next((len(one) for one in keys if one is not None), None)


def dtypes(cache: Cache) -> set[torch.dtype]:
    """Return the types of the numbers that a cache holds keys of; keys of another type change it as they are added."""
    return {layer.keys.dtype for layer in cache.layers if getattr(layer, "keys", None) is not None}


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


def count_tokens(cache: Cache, tokens: int) -> None:
    """Let the count be `tokens`, where there is one."""
    if cache.layers and isinstance(cache.layers[-1], TokenCount):
        cache.layers[-1].length = tokens


def _wait_for_copies(cache: Cache) -> None:
    """Wait for the copies of an offloaded cache, which run while the host continues."""
    devices = (
        {layer.device for layer in cache.layers if layer.is_initialized and layer.keys is not None}
        if cache.offloading
        else ()
    )
    for device in devices:
        synchronize(device)
