"""Prefix cache: keys and values of recent sequences; sequences that start alike are read from where they differ.

A radix tree of tokens (SGLang's RadixAttention, 2312.07104) per API key and model: draft models read sequences too.
Every segment holds the slots of its own tokens, so a prefix that many sequences share is stored once. Segments never
change: a sequence is decoded in its own cache, which starts with a copy of them, and a copy of its slots is added to
the tree. transformers' own caches do not fit: a copied `DynamicCache` belongs to a whole batch, stores a prefix once
per sequence and cannot be found by tokens; its paged cache takes no tree mask.

Recurrent states cannot be cut. For models that have them, the state at the end of every stored sequence is kept, and a
new sequence is read from the last such point on its path.

Cost: comparing tokens, and copying slots in and out, about a thousandth of reading them. Eviction removes the least
recently used segment, without a search.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from .._util.device import memory, outside_inference_mode
from .._util.locks import Lock
from .compat import LinearAttentionLayer
from .kv_cache import Slots, TreeCache
from .recurrence import bytes_of_states
from .target import Target

_SHARE = 8
"""Default budget: one part in this many of the memory that weights leave free."""


@dataclass(eq=False)
class _Segment:
    """Consecutive tokens of a sequence, after those of the segments above."""

    tokens: np.ndarray  # (n,) int64
    slots: Slots = field(default_factory=list)
    above: _Segment | None = None
    below: dict[int, _Segment] = field(default_factory=dict)
    """Segments that follow, by their first tokens."""
    end: list[LinearAttentionLayer] | None = None
    """Recurrent states after a sequence that ended here."""

    @property
    def nbytes(self) -> int:
        return _bytes(self.slots) + bytes_of_states(self.end or ())

    def split(self, n: int) -> _Segment:
        """Split the segment in two, and return the upper one, of n tokens."""
        assert self.above is not None
        upper = _Segment(self.tokens[:n], _cloned(self.slots, 0, n), self.above)
        self.above.below[int(self.tokens[0])] = upper
        self.slots = _cloned(self.slots, n, len(self.tokens))
        self.tokens, self.above = self.tokens[n:].copy(), upper
        upper.below[int(self.tokens[0])] = self
        return upper


def default_budget(target: Target) -> int:
    """Return the default budget of a `PrefixCache` in bytes: an eighth of the device memory left by the weights."""
    weights = sum(weight.nbytes for weight in target.model.parameters() if weight.device == target.device)
    copied = 0 if target.prepacked is None else target.prepacked.nbytes
    return max(0, memory(target.device) - weights - copied) // _SHARE


def own_prefixes(target: Target) -> Prefixes:
    """Return prefixes in a new cache with the default budget, for one conversation or batch."""
    return PrefixCache(target, default_budget(target)).of("")


class PrefixCache:
    """Slots of recent sequences, up to a number of bytes; thread-safe. `Prefixes` reads and writes them."""

    def __init__(self, target: Target, limit: int) -> None:
        """`target`: the model whose slots `of` stores; `limit`: bytes for all API keys and models; 0 caches nothing."""
        self.target, self.limit = target, limit
        self.nbytes = 0
        """Bytes in use."""
        self.roots: dict[Prefixes, _Segment] = {}
        """By part, the empty segment above all of its segments; only of parts with segments."""
        self._by_use: OrderedDict[_Segment, None] = OrderedDict()
        """All segments, least recently used first, and each before the one above it: the first is a leaf."""
        self.lock = Lock()

    def of(self, key: str) -> Prefixes:
        """Return the part of the cache that belongs to one API key and the target."""
        return Prefixes(self, key, self.target)

    def forget(self, key: str) -> None:
        """Drop the part of an API key."""
        with self.lock:
            segments = [self.roots.pop(part) for part in [*self.roots] if part.key == key]
            while segments:
                segment = segments.pop()
                segments += segment.below.values()
                if segment in self._by_use:
                    del self._by_use[segment]
                    self.nbytes -= segment.nbytes

    def __len__(self) -> int:
        """Return the number of cached tokens."""
        with self.lock:
            return sum(len(segment.tokens) for segment in self._by_use)

    def use(self, path: list[_Segment]) -> None:
        """Mark segments, given from the top down, as most recently used. The caller holds `lock`."""
        for segment in reversed(path):
            self._by_use[segment] = None
            self._by_use.move_to_end(segment)

    def make_room(self, needed: int, path: list[_Segment]) -> bool:
        """Evict the least recently used segments until `needed` bytes fit next to `path`, which was used just now.
        Return False, and evict nothing, if they cannot fit. The caller holds `lock`.
        """
        if needed + sum(segment.nbytes for segment in path) > self.limit:
            return False
        while self.nbytes + needed > self.limit:
            oldest, _ = self._by_use.popitem(last=False)
            assert oldest.above is not None
            del oldest.above.below[int(oldest.tokens[0])]
            self.nbytes -= oldest.nbytes
        self.roots = {part: root for part, root in self.roots.items() if root.below}  # others keep their model alive
        return True


@dataclass(frozen=True)
class Prefixes:
    """The part of a `PrefixCache` that belongs to one API key and one model."""

    cache: PrefixCache
    key: str
    model: Target

    def of(self, model: Target) -> Prefixes:
        """Return the part of another model, such as a draft model, for the same API key."""
        return replace(self, model=model)

    @outside_inference_mode
    def take(self, ids: torch.Tensor) -> tuple[TreeCache, int]:
        """Return a cache that holds the first n tokens of `ids` (length,), fewer than all, and n."""
        with self.cache.lock:
            path, n = self._cached(ids)
            cache = self.model.new_cache()
            cache.keep_all()  # also slots outside windows: any prefix may be requested again
            if n:
                self.cache.use(path)
                _fill(cache, path, n)
            return cache, n

    def cached_tokens(self, ids: torch.Tensor) -> int:
        """Return how many tokens `take` would return now."""
        with self.cache.lock:
            return self._cached(ids)[1]

    def _cached(self, ids: torch.Tensor) -> tuple[list[_Segment], int]:
        """Return the cached segments of a sequence's prefix, the last one perhaps in part, and the tokens in them."""
        info = self.model.info
        path, n = _match(ids[:-1].cpu().numpy(), self.cache.roots.get(self))
        if info.recurrent:
            while path and (path[-1].end is None or n < _tokens_of(path)):
                path.pop()
                n = _tokens_of(path)
        return ([], 0) if self._is_beyond(len(ids)) or info.why_not_read_on(n, len(ids)) else (path, n)

    def _is_beyond(self, length: int) -> bool:
        """Return whether the model computes a whole sequence of this length differently from the cached one."""
        threshold = self.model.info.length_threshold
        return threshold is not None and not threshold.repeats and length > threshold.at

    @outside_inference_mode
    def keep(self, ids: torch.Tensor, cache: TreeCache, row: int = 0) -> None:
        """Store the slots of a sequence (length,), except its last token, from row `row` of a cache, if that holds them
        all. The least recently used segments are evicted; a sequence larger than the limit is not stored.
        """
        store, tokens = self.cache, ids[:-1].cpu().numpy().copy()
        if not store.limit or not 0 < len(tokens) <= cache.length or self._is_beyond(len(tokens)):
            return
        if any(cache.starts):  # slots outside a window are gone
            return
        with store.lock:
            root = store.roots.get(self) or _Segment(tokens[:0])
            path, n = _match(tokens, root)
            if n < _tokens_of(path):
                path[-1] = path[-1].split(n - _tokens_of(path[:-1]))
            store.use(path)
            ends_here = path and n == len(tokens) and path[-1].end
            end = None if cache.states is None or ends_here else cache.states.copies(row)
            needed = (len(tokens) - n) * _bytes(cache.slice(row, 0, 1)) + bytes_of_states(end or ())
            if not store.make_room(needed, path):
                return
            last = path[-1] if path else root
            if n < len(tokens):
                added = _Segment(tokens[n:], _cloned(cache.slice(row, n, len(tokens))), last)
                last.below[int(tokens[n])] = last = added
                store.use([*path, added])
                store.nbytes += last.nbytes
            if end is not None:
                store.nbytes -= last.nbytes
                last.end = end
                store.nbytes += last.nbytes
            store.roots[self] = root


def _match(tokens: np.ndarray, root: _Segment | None) -> tuple[list[_Segment], int]:
    """Return the segments that agree with `tokens`, the last one perhaps in part, and how many tokens agree."""
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


def _tokens_of(path: list[_Segment]) -> int:
    return sum(len(segment.tokens) for segment in path)


def _fill(cache: TreeCache, path: list[_Segment], n: int) -> None:
    """Copy the first n slots of these segments into an empty cache."""
    at = 0
    cache.expect(n)
    for segment in path:
        more = min(len(segment.tokens), n - at)
        cache.append([[states[..., :more, :] for states in layer] for layer in segment.slots])
        at += more
    if cache.states is not None and path[-1].end is not None:
        cache.states.take(path[-1].end)
        cache.states.counter.length = n


def _bytes(slots: Slots) -> int:
    return sum(states.nbytes for layer in slots for states in layer)


def _cloned(slots: Slots, first: int = 0, last: int | None = None) -> Slots:
    return [[states[..., first:last, :].clone() for states in layer] for layer in slots]
