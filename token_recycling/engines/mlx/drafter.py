"""What is kept of an mlx-lm model from text to text: the matrix, the past, and what passes take on this machine."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from ...costs.curve import CostCurve
from ...costs.online import OnlineCurve
from ...recycling.matrix_file import check_vocabulary, fingerprint
from ..replica import EngineOptions, Replica
from ..versions import check_version
from .cache import layers_of

LOWEST, BEYOND = (0, 32), (0, 33)
"""mlx-lm from the first to before the second has this interface."""
_SIZES = (1, 2, 4, 8, 16, 32)
"""Passes that are timed, up to the longest of all: a token and its draft."""
_ROUNDS, _AHEAD = 2, 4
"""How often, since other work only ever adds; and how many passes of one token are started before any is waited for."""
_NOTHING = np.empty(0, np.int32)


class TokenRecycling:
    """Drafts for one model; give it as `draft_model`. `options` are those of `EngineOptions`, by name; passes are
    timed, unless `token_cost` says what they take.

    Raises ValueError for a wrong option and RuntimeError for an mlx-lm that is not known.
    """

    most = _SIZES[-1] - 1
    """Tokens of the longest draft."""

    def __init__(self, **options: Any) -> None:
        check_version("mlx-lm", mlx_lm.__version__, LOWEST, BEYOND)
        self.options = EngineOptions.parse(options)
        self.recycler: Replica | None = None
        """What was learned; None until the first text."""
        self._model: weakref.ref | None = None
        given = 1 + self.options.token_cost * np.arange(self.most + 1)
        self._given = given if "token_cost" in options else None
        self._timed: OnlineCurve | None = None
        self._tokenizer = ""
        self._texts: weakref.WeakKeyDictionary[Any, np.ndarray] = weakref.WeakKeyDictionary()
        """By the layer of a cache."""

    def attach(self, model: Any, tokenizer: Any) -> None:
        """From now on for this model, as long as it is there. Raises ValueError for another."""
        attached = self._model and self._model()
        if attached is not None and attached is not model:
            raise ValueError("expected the model of earlier calls, got another; make a TokenRecycling for each model")
        if attached is None:
            self._model, self._timed = weakref.ref(model), None
            self._tokenizer = fingerprint(tokenizer) if self.options.matrix else ""

    def prepare(self, vocab_size: int) -> Replica:
        """The matrix and what belongs to it; raises MatrixFileError for a file that is damaged or of another tokenizer
        or other options.
        """
        if self.recycler is None:
            self.recycler = Replica(vocab_size, self.most, self.options, self._tokenizer, chains=True)
            self.recycler.warm_up(np.int32)
            weakref.finalize(self, self.recycler.save)
        check_vocabulary(self.recycler.matrix.vocab_size, vocab_size)
        return self.recycler

    def text_of(self, cache: Sequence[Any]) -> np.ndarray:
        """The tokens (n,) int32 that are known to lie in a cache: what was read and said with it by this object."""
        for layer in _with_lengths(cache):
            text = self._texts.get(layer, _NOTHING)
            return text[: layer.offset] if len(text) >= layer.offset else _NOTHING
        return _NOTHING

    def keep_text(self, cache: Sequence[Any], text: np.ndarray) -> None:
        """Remembers, as long as the cache is there, what lies in it."""
        for layer in _with_lengths(cache):
            self._texts[layer] = text

    def costs(self, model: Any, tokens: np.ndarray) -> np.ndarray:
        """(most + 1,) float64: what passes of 1, 2, ... tokens take, that of 1 with the next one started before its
        token is known. They are timed when this is asked for first, on `tokens` (any,) of a text.
        """
        if self._given is not None:
            return self._given
        if self._timed is None:
            self._timed = _timed(model, mx.array(np.resize(tokens, _SIZES[-1])))
        return self._timed.seconds

    def took(self, tokens: int, seconds: float) -> None:
        """What a pass of so many tokens took, with drafting and learning."""
        if self._timed is not None:
            self._timed.took(tokens, seconds)


def _with_lengths(cache: Sequence[Any]) -> Iterator[Any]:
    """The layers that know how many tokens they have read."""
    return (layer for layer in layers_of(cache) if hasattr(layer, "offset"))


def _timed(model: Any, tokens: mx.array) -> OnlineCurve:
    """Times passes over the first of `tokens` (n,), in a cache of its own."""
    cache = make_prompt_cache(model)
    best: dict[int, float] = {}

    def newest(tokens: mx.array) -> mx.array:
        return mx.argmax(model(tokens[None], cache=cache)[:, -1], axis=-1)

    for _ in range(_ROUNDS):
        for size in _SIZES:
            began = time.perf_counter()
            if size == 1:
                drawn = tokens[:1]
                for _ in range(_AHEAD):
                    drawn = newest(drawn)
                    mx.async_eval(drawn)
                mx.eval(drawn)
            else:
                mx.eval(newest(tokens[:size]))
            taken = (time.perf_counter() - began) / (_AHEAD if size == 1 else 1)
            best[size] = min(taken, best.get(size, taken))
    curve = CostCurve(len(tokens), _SIZES, tuple(best[size] for size in _SIZES))
    return OnlineCurve(curve.convex().times())
