"""Keys and values of the newest texts, so that a text that begins as one of them did is read from where they part.

A radix tree of tokens (SGLang's RadixAttention, 2312.07104), one for each API key: every segment holds the slots of its
own tokens, so that a beginning that many texts share is held once. What is kept never changes. A text is decoded in a
cache of its own, which begins with a copy; of it a copy is kept. transformers' own ways do not fit: a copied
`DynamicCache` (its "prefix caching") is of a whole batch, holds a beginning once a text and cannot be found by tokens;
its paged cache gives no tree its mask.

States over the text cannot be cut. Of a model that keeps some, a copy stands at the end of every text that was kept,
and a text is read from the last such place that it passes.

Cost: comparing tokens, and copying slots, both ways: about a thousandth of reading them. Eviction takes the
segment used least recently, without a search.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache

from .._util.device import memory
from .._util.locks import Lock
from .kv_cache import SlotStore, TreeCache, slots
from .recurrence import bytes_of_states, select_states
from .remembered import lasting
from .tree_model import TreeModel

Layers = list[Any]

_SHARE = 8
"""Default budget: this part of the memory that weights leave free."""


@dataclass(eq=False)
class _Segment:
    """Some tokens of a text, behind those of the segments above."""

    tokens: np.ndarray  # (n,) int64
    parts: list[torch.Tensor] = field(default_factory=list)
    """Of every store (tensors, heads, n, size), then of every indexed layer (n, size)."""
    above: _Segment | None = None
    below: dict[int, _Segment] = field(default_factory=dict)
    """By their first tokens."""
    end: Layers | None = None
    """The layers without slots, as a text left them that ended here; of models with states over the text alone."""
    end_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) + self.end_bytes


def default_budget(target: TreeModel) -> int:
    """Return bytes for a `PrefixCache`: an eighth of what the model's weights leave of its device's memory."""
    weights = sum(weight.nbytes for weight in target.model.parameters() if weight.device == target.device)
    copied = 0 if target.prepacked is None else target.prepacked.nbytes
    return max(0, memory(target.device) - weights - copied) // _SHARE


class PrefixCache:
    """Slots of the newest texts, up to a number of bytes; used by several threads."""

    def __init__(self, target: TreeModel, limit: int) -> None:
        """`limit`: bytes, of all keys together; at 0 nothing is kept."""
        self.target, self.limit = target, limit
        self.nbytes = 0
        """What is held now, in bytes."""
        self._roots: dict[str, _Segment] = {}
        self._by_use: OrderedDict[_Segment, None] = OrderedDict()
        """All segments, those used least recently first, and each before the one above it: the first is a leaf."""
        self._blank: tuple[Layers, list[SlotStore]] | None = None
        """The layers of a cache without slots, and their stores; None before the first text."""
        self._lock = Lock()

    def of(self, key: str) -> Prefixes:
        """What is kept of one API key."""
        return Prefixes(self, key)

    @lasting()
    def take(self, ids: torch.Tensor, key: str) -> tuple[Cache, int]:
        """A cache that holds the first n tokens of `ids` (length,), fewer than all, and n."""
        with self._lock:
            path, n = self._found(ids, key)
            if not n:
                return self.target.new_cache(), 0
            self._use(path)
            return self._copied(path, n), n

    def known(self, ids: torch.Tensor, key: str) -> int:
        """How many tokens `take` would give now."""
        with self._lock:
            return self._found(ids, key)[1]

    def _found(self, ids: torch.Tensor, key: str) -> tuple[list[_Segment], int]:
        """The segments that a text can begin with, the last one perhaps in part, and how many of its tokens."""
        support, border = self.target.info, self.target.info.border
        path, n = self._match(ids[:-1].cpu().numpy(), self._roots.get(key))
        if support.recurrent:
            while path and (path[-1].end is None or n < sum(len(one.tokens) for one in path)):
                path, n = path[:-1], sum(len(one.tokens) for one in path[:-1])
        # Beyond some borders all of a text is computed otherwise than what is kept was.
        across = border is not None and not border.repeats and len(ids) > border.at
        return ([], 0) if across or support.cannot_read_on(n, len(ids)) else (path, n)

    @lasting()
    def keep(self, ids: torch.Tensor, cache: Cache, key: str, row: int = 0) -> None:
        """Keep what a cache holds of `ids` (length,), all of them, as text number `row`. What was used least recently
        makes room; what is larger than the limit is not kept.
        """
        border, tokens = self.target.info.border, ids.cpu().numpy().copy()
        if not self.limit or not len(tokens) or (border is not None and not border.repeats and len(tokens) > border.at):
            return
        held = TreeCache(cache)
        with self._lock:
            self._learn_layers(cache, held)
            path, n = self._match(tokens, self._roots.setdefault(key, _Segment(tokens[:0])))
            if n < sum(len(one.tokens) for one in path):
                path[-1] = self._split(path[-1], n - sum(len(one.tokens) for one in path[:-1]))
            self._use(path)
            of_slot = sum(part[..., :1, :].nbytes for part in held.parts(row, 0, 1))
            ends = self.target.info.recurrent and not (path and n == len(tokens) and path[-1].end)
            end = self._without_slots(cache, held, row) if ends else None
            end_bytes = 0 if end is None else bytes_of_states(_of_layers(cache, end))
            if not self._make_room((len(tokens) - n) * of_slot + end_bytes, path):
                return
            last = path[-1] if path else self._roots[key]
            if n < len(tokens):
                added = _Segment(tokens[n:], [part.clone() for part in held.parts(row, n, len(tokens))], last)
                last.below[int(tokens[n])] = last = added
                self._use([*path, added])
                self.nbytes += last.nbytes
            if end is not None:
                last.end, last.end_bytes = end, end_bytes
                self.nbytes += end_bytes

    def __len__(self) -> int:
        """Number of tokens that are held."""
        with self._lock:
            return sum(len(one.tokens) for one in self._by_use)

    @staticmethod
    def _match(tokens: np.ndarray, root: _Segment | None) -> tuple[list[_Segment], int]:
        """The segments that agree with `tokens`, the last one perhaps in part, and how many tokens agree."""
        path: list[_Segment] = []
        n = 0
        while root is not None and n < len(tokens) and int(tokens[n]) in root.below:
            root = root.below[int(tokens[n])]
            most = min(len(root.tokens), len(tokens) - n)
            same = int((root.tokens[:most] == tokens[n : n + most]).cumprod().sum())
            path.append(root)
            n += same
            if same < len(root.tokens):
                break
        return path, n

    def _split(self, segment: _Segment, n: int) -> _Segment:
        """Make two of a segment, the upper one of n tokens, which is returned."""
        above = segment.above
        assert above is not None
        upper = _Segment(segment.tokens[:n], [part[..., :n, :].clone() for part in segment.parts], above)
        lower = [part[..., n:, :].clone() for part in segment.parts]
        above.below[int(segment.tokens[0])] = upper
        segment.tokens, segment.parts, segment.above = segment.tokens[n:].copy(), lower, upper
        upper.below[int(segment.tokens[0])] = segment
        return upper

    def _use(self, path: list[_Segment]) -> None:
        """Put segments, from the top down, behind all that were used before."""
        for segment in reversed(path):
            self._by_use[segment] = None
            self._by_use.move_to_end(segment)

    def _make_room(self, wanted: int, path: list[_Segment]) -> bool:
        """Evict segments, those used least recently first, until `wanted` bytes fit beside `path`, which was used just
        now. Return False, and evict nothing, where they cannot fit.
        """
        if wanted + sum(segment.nbytes for segment in path) > self.limit:
            return False
        while self.nbytes + wanted > self.limit:
            oldest, _ = self._by_use.popitem(last=False)
            assert oldest.above is not None
            del oldest.above.below[int(oldest.tokens[0])]
            self.nbytes -= oldest.nbytes
        return True

    def _learn_layers(self, cache: Cache, held: TreeCache) -> None:
        """Remember what the layers of this model's caches are."""
        if self._blank is None:
            stores = [SlotStore(_shape(store, 0), len(store.tensors), store.buffer) for store in held.stores]
            memo = {id(store): empty for store, empty in zip(held.stores, stores, strict=True)}
            self._blank = copy.deepcopy(cache.layers, memo), stores

    def _without_slots(self, cache: Cache, held: TreeCache, row: int) -> Layers:
        """A copy of the layers, with the states of one text and no slots."""
        assert self._blank is not None
        memo = {id(store): empty for store, empty in zip(held.stores, self._blank[1], strict=True)}
        layers = copy.deepcopy(cache.layers, memo)
        select_states(_of_layers(cache, layers), [row])
        return layers

    def _copied(self, path: list[_Segment], n: int) -> Cache:
        """A cache with the first n slots of these segments, and room for as many more."""
        assert self._blank is not None
        layers, empty = self._blank if path[-1].end is None else (path[-1].end, self._blank[1])
        stores = [SlotStore(_shape(store, n), len(store.tensors), store.buffer) for store in empty]
        memo = {id(store): room for store, room in zip(empty, stores, strict=True)}
        cache = _of_layers(self.target.new_cache(), copy.deepcopy(layers, memo))
        held, at = TreeCache.of_length(cache, n), 0
        for segment in path:
            more = min(len(segment.tokens), n - at)
            for into, part in zip(held.parts(0, at, at + more), segment.parts, strict=True):
                into.copy_(part[..., :more, :])
            at += more
        return cache


@dataclass(frozen=True)
class Prefixes:
    """What is kept of one API key; see `PrefixCache`."""

    kept: PrefixCache
    key: str = ""

    def take(self, ids: torch.Tensor) -> tuple[Cache, int]:
        """A cache that holds the first n tokens of `ids` (length,), fewer than all, and n."""
        return self.kept.take(ids, self.key)

    def known(self, ids: torch.Tensor) -> int:
        """How many tokens `take` would give now."""
        return self.kept.known(ids, self.key)

    def keep(self, ids: torch.Tensor, cache: Cache, row: int = 0) -> None:
        """Keep what a cache holds of a text (length,), all but its last token, if it holds just that."""
        if slots(cache) >= len(ids) - 1:
            self.kept.keep(ids[:-1], cache, self.key, row)


def _of_layers(cache: Cache, layers: Layers) -> Cache:
    """A cache like another, with these layers."""
    made = copy.copy(cache)
    made.layers = layers
    return made


def _shape(store: SlotStore, slots: int) -> torch.Size:
    _, _, heads, _, size = store.buffer.shape
    return torch.Size((1, heads, slots, size))
