"""State kept for an mlx-lm model across requests: the matrix, the history, and the cost of forward passes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import mlx_lm
import numpy as np

from ...recycling.matrix_file import check_vocabulary, fingerprint
from ..replica import EngineOptions, PassCosts, Replica
from ..versions import check_version
from .cache import layers_of

LOWEST, BEYOND = (0, 32), (0, 33)
"""mlx-lm from the first to before the second has this interface."""
_LONGEST = 32
"""A token and its draft, at most."""
_PASS = 0.01
"""Seconds of a pass over one token, as long as nothing is known."""
_NOTHING = np.empty(0, np.int32)


class TokenRecycling:
    """Drafts for one model; give it as `draft_model`. `options` are those of `EngineOptions`; what passes take is
    learned, unless `token_cost` says it. Raises ValueError for a wrong option and RuntimeError for an mlx-lm that is
    not known.
    """

    most = _LONGEST - 1
    """Tokens of the longest draft."""

    def __init__(self, **options: Any) -> None:
        check_version("mlx-lm", mlx_lm.__version__, LOWEST, BEYOND)
        self.options = EngineOptions.parse(options)
        self.recycler: Replica | None = None
        """Matrix and drafting state; None until the first sequence."""
        self._model: weakref.ref | None = None
        usual = _PASS * (1 + self.options.token_cost * np.arange(self.most + 1))
        self._new_passes = partial(PassCosts, options, usual)
        self._passes = self._new_passes()
        """Costs of the model's forward passes."""
        self._tokenizer = ""
        self._sequences: weakref.WeakKeyDictionary[Any, np.ndarray] = weakref.WeakKeyDictionary()
        """By the layer of a cache."""

    def attach(self, model: Any, tokenizer: Any) -> None:
        """From now on for this model, as long as it is there. Raises ValueError for another."""
        attached = self._model and self._model()
        if attached is not None and attached is not model:
            raise ValueError("this TokenRecycling was used with another model; make one for each model")
        if attached is None:
            self._model = weakref.ref(model)
            self._passes = self._new_passes()
            self._tokenizer = fingerprint(tokenizer) if self.options.matrix else ""

    def prepare(self, vocab_size: int) -> Replica:
        """The matrix and its recycler; raises MatrixFileError for a damaged file or one of another tokenizer."""
        if self.recycler is None:
            self.recycler = Replica(vocab_size, self.most, self.options, self._tokenizer, chains=True)
            self.recycler.warm_up(np.int32)
            weakref.finalize(self, self.recycler.save)
        check_vocabulary(self.recycler.matrix.vocab_size, vocab_size)
        return self.recycler

    def sequence_of(self, cache: Sequence[Any]) -> np.ndarray:
        """Return the tokens (n,) int32 in a cache, as far as this object has read or generated them."""
        for layer in _with_lengths(cache):
            text = self._sequences.get(layer, _NOTHING)
            return text[: layer.offset] if len(text) >= layer.offset else _NOTHING
        return _NOTHING

    def keep_text(self, cache: Sequence[Any], text: np.ndarray) -> None:
        """Remember the tokens in a cache, for as long as it exists."""
        for layer in _with_lengths(cache):
            self._sequences[layer] = text

    def costs(self) -> np.ndarray:
        """(most + 1,) float64: what passes of 1, 2, ... tokens take, as given by `token_cost`, else as learned."""
        return self._passes.seconds

    def took(self, tokens: int, seconds: float) -> None:
        """Record the time of a forward pass over so many tokens, drafting and learning included."""
        self._passes.took(tokens, seconds)


def _with_lengths(cache: Sequence[Any]) -> Iterator[Any]:
    """The layers that know how many tokens they have read."""
    return (layer for layer in layers_of(cache) if hasattr(layer, "offset"))
