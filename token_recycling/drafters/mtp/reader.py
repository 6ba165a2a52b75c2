"""A text as MTP layers read it, and the chain that they foresee behind it.

Each row is a state of the target and the token after it, as the first layer reads them; every further layer reads the
same rows with the tokens one place later, the last of which are not text yet but drafted. So what a cache holds of the
last rows, one less than there are layers, is forgotten before the next pass and read again: the rows that stay have
read text alone. Cost: a pass of every layer over the rows that are new and those few, and of the last layer over each
token that is drafted beyond.
"""

from __future__ import annotations

import torch

from ...model.compat import MtpCache, MtpModel
from .._shared.states import UnreadStates

_PIECE = 512
"""Rows that are read at once."""


class MtpReader(UnreadStates):
    """One text, as far as it was read; states (n, hidden) whose rows do not stay in the cache yet count as unread."""

    def __init__(self, layers: MtpModel, prompt: int) -> None:
        """`prompt`: tokens of the text as it begins."""
        super().__init__(prompt)
        self._layers = layers
        self._new_cache()

    def _new_cache(self) -> None:
        self._cache = MtpCache(config=self._layers.config)
        self._cache.activate_past_recording()
        self._surplus, self._beyond = 0, 0
        """Rows in the cache that do not stay, and those of the last layer after them."""

    @torch.no_grad()
    def read(self, text: torch.Tensor) -> torch.Tensor:
        """Logits (layers, vocabulary) of the tokens after `text` (length,), each if the best ones stand before it."""
        states = self.taken()
        while True:
            self._forget()
            piece = states[:_PIECE]
            logits = self._pass(piece, text[self._next + 1 :][: len(piece)])
            self._surplus = min(len(piece), len(self._layers.layers) - 1)
            self._next += len(piece) - self._surplus
            self._unread = [states[len(piece) - self._surplus :]]
            if len(piece) == len(states):
                return logits
            states = self._unread[0]

    def _forget(self) -> None:
        """What does not stay."""
        if self._next == self.begin:
            self._new_cache()
            return
        *others, last = self._cache.layers
        for layer in others:
            layer.crop(-self._surplus)
        last.crop(-self._surplus - self._beyond)
        self._beyond = 0

    def _pass(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (layers, vocabulary) of all layers after the last of some rows."""
        self._hidden, self._tokens = states[None], tokens[None]
        self._places = torch.arange(self._next + 1, self._next + 1 + len(tokens), device=tokens.device)[None]
        return torch.cat([self._layer(number) for number in range(len(self._layers.layers))])

    def _layer(self, number: int) -> torch.Tensor:
        """Logits (1, vocabulary) of a layer after the last row; the next one reads rows one place later."""
        self._hidden = self._layers.forward_layer(
            number, self._hidden, self._places, self._cache, input_ids=self._tokens
        )
        logits = self._layers._project_to_logits(self._hidden[:, -1])
        self._tokens = torch.cat([self._tokens[:, 1:], logits.argmax(dim=-1, keepdim=True)], dim=1)
        self._places = self._places + 1
        return logits

    @torch.no_grad()
    def read_on(self) -> torch.Tensor:
        """Logits (1, vocabulary) of the token after all that were foreseen: the last layer reads its own output."""
        self._hidden, self._tokens, self._places = self._hidden[:, -1:], self._tokens[:, -1:], self._places[:, -1:]
        self._beyond += 1
        return self._layer(len(self._layers.layers) - 1)
