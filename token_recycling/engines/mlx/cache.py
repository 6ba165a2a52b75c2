"""Rolls mlx-lm's prompt caches back: removes drafted tokens that were not accepted.

Keys and values are trimmed, as mlx-lm does it; those of a rotating cache, which a forward pass of several tokens leaves
in order, are cut at the end. Recurrent layers (`ArraysCache`) get back their earlier state, and the accepted tokens are
read again: mlx-lm replaces such states and never writes into them, so that keeping them copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

_TRIMMED = (KVCache, QuantizedKVCache, ChunkedKVCache)


def layers_of(cache: Sequence[Any]) -> Iterator[Any]:
    """All layers, those of layers with several caches too."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from layers_of(layer.caches)
        else:
            yield layer


def unknown_layers(cache: Sequence[Any]) -> list[str]:
    """The kinds of layers that may not be able to go back."""
    known = (*_TRIMMED, RotatingKVCache, ArraysCache)
    return sorted({type(layer).__name__ for layer in layers_of(cache) if type(layer) not in known})


def most_rows(cache: Sequence[Any], quantised_from: int | None) -> int | None:
    """Return how many tokens of a forward pass can all be rolled back; None for no limit.

    `quantised_from`: the length from which on mlx-lm quantises the cache, after a pass. A rotating cache that keeps the
    first tokens (`max_kv_size`) forgets others where it is full than a pass of several tokens is shown.
    """
    limits = []
    for layer in layers_of(cache):
        if type(layer) is RotatingKVCache and layer.keep:
            limits.append(layer.max_size - layer.offset)
        elif type(layer) is KVCache and quantised_from is not None:
            limits.append(quantised_from - 1 - layer.offset)
    return min(limits, default=None)


class Before:
    """A prompt cache as it is before a pass of several tokens, which may be taken back."""

    def __init__(self, cache: Sequence[Any]) -> None:
        self._cache = cache
        self._reads_again = any(type(layer) is ArraysCache for layer in layers_of(cache))
        self._states = [_state(layer) for layer in layers_of(cache)] if self._reads_again else []

    def keep(self, kept: int, rows: int) -> int:
        """After a pass of `rows` tokens: takes back all but `kept`. Returns how many of these must be read again."""
        if kept == rows:
            return 0
        if not self._reads_again:
            for layer in layers_of(self._cache):
                _drop(layer, rows - kept)
            return 0
        for layer, state in zip(layers_of(self._cache), self._states, strict=True):
            if state is None:
                layer.trim(rows)
            else:
                layer.state = state
        return kept


def _state(layer: Any) -> Any:
    """Return the state to restore; None for layers that are trimmed."""
    if type(layer) is ArraysCache:
        arrays, *others = layer.state
        return list(arrays), *others
    return layer.state if type(layer) is RotatingKVCache else None


def _drop(layer: Any, rows: int) -> None:
    if type(layer) is RotatingKVCache:
        kept = layer.keys.shape[2] - rows
        layer.keys, layer.values = layer.keys[..., :kept, :], layer.values[..., :kept, :]
        layer.offset, layer._idx = layer.offset - rows, kept
    else:
        layer.trim(rows)
