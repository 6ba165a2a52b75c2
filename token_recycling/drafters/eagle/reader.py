"""A head that reads one sequence and, ahead of it, a tree that grows layer by layer.

A row is a token and the hidden state before it: the target's, once known, and the head's own within a tree. The cache
keeps only rows with the target's states: accepted draft tokens are read again with these. Tokens that were in the
target's cache before the call are skipped, since their states are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from ...model.attention import attending
from ...model.compat import attention_name
from .._shared.states import PendingStates, appending
from .head import EagleHead

_PIECE = 512


@dataclass(frozen=True)
class PlacedHead:
    """A head on the target's device, with the target's layers that it uses."""

    head: EagleHead
    embedding: torch.nn.Module
    """The target's embedding, or the head's own."""
    output: torch.nn.Module
    """The target's output layer."""
    vocabulary: int
    """The target's number of logits."""
    device: torch.device
    dtype: torch.dtype

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings (1, n, width) of tokens (n,)."""
        return self.embedding(tokens[None].to(self.device)).to(self.device, self.dtype)

    def outputs(self, *inputs: Any) -> torch.Tensor:
        """Return the head's outputs; see `EagleHead.forward`. Query heads that share keys do not copy them."""
        layer = self.head.shape.layer
        with attending(layer, attention_name(layer), grouped=True):
            outputs: torch.Tensor = self.head(*inputs)
        return outputs

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return logits (n, vocabulary) from outputs (n, width); -inf for tokens that the head cannot predict."""
        logits = self.head.logits(outputs, self.output).to(self.device)
        if self.head.ids is None:
            return logits
        everything = logits.new_full((len(logits), self.vocabulary), float("-inf"))
        return everything.index_copy_(1, self.head.ids, logits)


class HeadReader(PendingStates):
    """One sequence as far as it was read, and the nodes below its last token in order of reading."""

    def __init__(self, placed: PlacedHead, prompt: int) -> None:
        super().__init__(prompt)
        self._placed = placed
        self._cache = appending(DynamicCache())
        self._outputs = torch.empty(0)
        """(nodes, width): the head's outputs at the nodes read so far, the sequence's last token first."""
        self._visible, self._depths = torch.empty(0), torch.empty(0)
        """Which nodes except the first each node attends to, (nodes, nodes - 1) bool; depths (nodes,) int64."""

    @property
    def knows(self) -> bool:
        """Whether any state is known, so that it can draft."""
        return self._next > self.begin or self.waits

    @torch.no_grad()
    def read(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return logits (1, vocabulary) after `sequence` (length,); the states of all tokens except the last must be
        known.
        """
        if len(self._outputs) > 1:
            self._cache.crop(1 - len(self._outputs))
        if self._pending:
            states = self.taken()
            following = sequence[self._next + 1 :].to(self._placed.device)
            for some, tokens in zip(states.split(_PIECE), following.split(_PIECE), strict=True):
                outputs = self._read(some, tokens)
            self._outputs = outputs[-1:]
        self._outputs = self._outputs[:1]
        self._visible = torch.zeros(1, 0, dtype=torch.bool, device=self._placed.device)
        self._depths = torch.zeros(1, dtype=torch.long, device=self._placed.device)
        return self._placed.logits(self._outputs)

    def _read(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        n, cached, placed = len(tokens), self._next - self.begin, self._placed
        positions = torch.arange(self._next, self._next + n, device=placed.device)[None]
        mask = torch.ones(1, 1, n, cached + n, dtype=torch.bool, device=placed.device).tril(cached) if n > 1 else None
        fused = placed.head.fused(states[None].to(placed.dtype))
        keys = self._keys(positions[0])
        outputs = placed.outputs(placed.embed(tokens), fused, positions, mask, self._cache, keys)
        self._next += n
        return outputs[0]

    @torch.no_grad()
    def read_layer(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return logits (n, vocabulary) after n nodes, each below the node read as number `parents[i]`; root: 0."""
        placed, n = self._placed, len(tokens)
        below, drafted = torch.tensor([parents, tokens], device=placed.device)
        visible = torch.cat([self._visible[below], torch.eye(n, dtype=torch.bool, device=placed.device)], dim=1)
        depths = self._depths[below] + 1
        mask = pad(visible, (self._next - self.begin, 0), value=True)[None, None]
        states = placed.head.fed(self._outputs[below])[None]
        embedded = placed.embed(drafted)
        positions = depths + self._next - 1
        keys = self._keys(self._depths[1:] + self._next - 1, positions)
        outputs = placed.outputs(embedded, states, positions[None], mask, self._cache, keys)[0]
        self._outputs = torch.cat([self._outputs, outputs])
        self._visible = torch.cat([pad(self._visible, (0, n)), visible])
        self._depths = torch.cat([self._depths, depths])
        return placed.logits(outputs)

    def _keys(self, *positions: torch.Tensor) -> torch.Tensor | None:
        """Return the positions (keys,) of the rows read of the sequence and of further ones; None if no layer has a
        window.
        """
        if not any(self._placed.head.shape.windows):
            return None
        return torch.cat([torch.arange(self.begin, self._next, device=self._placed.device), *positions])
