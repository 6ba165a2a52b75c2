"""Key/value slots of fixed size: what a step of constant shapes reads and writes.

All layers of one shape share one preallocated tensor, as in `cache`. A step writes the slots of its nodes behind the
text, where the text ends being a number on the device, and attention runs over the first slots only, the *band*: a
number known beforehand, the same for many steps. The accepted slots are moved together by one gather and one scatter
of a fixed number of slots for the whole model; what is moved beyond the accepted ones lands behind the text, where it
is overwritten by the next step.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from transformers.cache_utils import Cache

from ..model.compat import OwnLayer
from ..model.kv_cache import unroll

_SHORTEST_BAND = 256


def band_of(slots: int) -> int:
    """The band for `slots` slots: 256, 512, 768, 1024, 1536, 2048, 3072, ..."""
    band = _SHORTEST_BAND
    while band < slots:
        band = band * 3 // 2 if band & (band - 1) == 0 and band > _SHORTEST_BAND else 1 << band.bit_length()
    return band


class FixedLayer(OwnLayer):
    """One layer's keys and values, (1, heads, capacity, size) each."""

    is_compileable = True
    is_sliding = False

    def __init__(self, shared: Shared, slots: tuple[torch.Tensor, torch.Tensor]) -> None:
        super().__init__()
        self.shared, (self.key_slots, self.value_slots) = shared, slots
        self.dtype, self.device, self.is_initialized = self.key_slots.dtype, self.key_slots.device, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing: the slots are there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes states (1, heads, n, size) behind the text; returns the slots of the band."""
        places, band = self.shared.places, self.shared.band
        self.key_slots.index_copy_(2, places, key_states)
        self.value_slots.index_copy_(2, places, value_states)
        return self.key_slots.narrow(2, 0, band), self.value_slots.narrow(2, 0, band)

    def get_seq_length(self) -> Any:
        return self.shared.length[0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The band, from slot 0 on; called only where no mask is given."""
        return self.shared.band, 0

    def get_max_length(self) -> int:
        return self.key_slots.shape[2]


class Shared:
    """What all layers of a cache look at."""

    def __init__(self, device: torch.device) -> None:
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        """(1,) int64 on the device: tokens of the text in the cache."""
        self.places = self.length
        """(n,) int64: the slots of the nodes of this step."""
        self.band = 0
        """How many slots attention runs over."""


class FixedCache(Cache):
    """Room for one text of up to `capacity` slots, nodes of a draft included."""

    @torch.no_grad()
    def __init__(self, like: Cache, capacity: int, device: torch.device) -> None:
        """`like` a cache of the same model with something in it, whose layers keep everything (`cache.unroll`)."""
        self.shared, self.capacity = Shared(device), capacity
        places: dict[tuple, list[tuple[int, int]]] = defaultdict(list)
        for index, layer in enumerate(like.layers):
            for part, states in enumerate((layer.keys, layer.values)):
                if states is not None:
                    places[states.shape[1], states.shape[3], states.dtype].append((index, part))
        self.stores: list[torch.Tensor] = []
        """(tensors, 1, heads, capacity, size) each."""
        slots: dict[tuple[int, int], torch.Tensor] = {}
        for (heads, size, dtype), members in places.items():
            # Zeros, since what attention hides is still multiplied by zero.
            store = torch.zeros(len(members), 1, heads, capacity, size, dtype=dtype, device=device)
            self.stores.append(store)
            slots.update(zip(members, store.unbind(), strict=True))
        super().__init__(
            [
                like.layers[index]
                if layer.keys is None
                else FixedLayer(self.shared, (slots[index, 0], slots[index, 1]))
                for index, layer in enumerate(like.layers)
            ]
        )

    def aim(self, nodes: int) -> torch.Tensor:
        """The slots (nodes,) int64 that come next, which the layers will write."""
        self.shared.places = self.shared.length + torch.arange(nodes, device=self.shared.length.device)
        return self.shared.places

    def commit(self, path: torch.Tensor, count: torch.Tensor) -> None:
        """Keeps the slots of the first `count` (1,) nodes of `path` (depths,), moved to the end of the text."""
        length = self.shared.length
        # The root, the first of the path, is where it belongs.
        sources, places = length + path[1:], length + torch.arange(1, len(path), device=length.device)
        if len(path) > 1:
            for store in self.stores:
                store.index_copy_(3, places, store.index_select(3, sources))
        length.add_(count)

    @torch.no_grad()
    def read(self, cache: Cache) -> None:
        """Takes over the text that another cache holds."""
        held = int(cache.get_seq_length())
        self.shared.length.fill_(held)
        if not held:
            return
        unroll(cache)
        # A cache that was made without a configuration lacks layers that share the states of others.
        for index, own in enumerate(self.layers):
            if isinstance(own, FixedLayer):
                own.key_slots[:, :, :held] = cache.layers[index].keys
                own.value_slots[:, :, :held] = cache.layers[index].values

    def write(self, cache: Cache, length: int) -> None:
        """Appends to the cache that the text was taken from what it does not have of the first `length` slots."""
        held = int(cache.get_seq_length())
        for index, layer in enumerate(self.layers):
            if isinstance(layer, FixedLayer):
                cache.update(layer.key_slots[:, :, held:length], layer.value_slots[:, :, held:length], index)
