"""A causal model that reads one sequence and, ahead of it, a tree that grows layer by layer.

Its own KV cache keeps the sequence and accepted nodes. Only uncached tokens are read: those that were not drafted, or
not on their own path. With a prefix cache, the first draft starts from the cached beginning of the prompt. Cost per
layer: one forward pass over its nodes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from ...model.hidden import last_state, layer_states
from ...model.prefill import prefill
from ...model.prefixes import Prefixes
from ...model.target import PassInputs, Target

_AT_ONCE = 32
"""With more new tokens than this, they are read like a prompt, in pieces and without logits."""


class Reader:
    """One sequence as far as it was read, and the nodes below its last token in order of reading."""

    def __init__(self, model: Target, states: bool = False) -> None:
        self.model = model
        self.states: torch.Tensor | None = None
        """(n, hidden size): the last hidden state of each of the n tokens of the last pass."""
        self._wants_states = states
        self.prefixes: Prefixes | None = None
        """Cache of the keys and values of prompts; None if the whole prompt is read."""
        self.cached = 0
        """Tokens of the sequence in the cache."""
        self._cache = model.new_cache()
        self._root_visible = torch.ones(1, 1, dtype=torch.bool, device=model.device)
        self._root_depth = torch.zeros(1, dtype=torch.long, device=model.device)
        self._visible, self._depths = self._root_visible, self._root_depth
        self._nodes, self._is_chain = 1, True

    def prefill(self, sequence: torch.Tensor) -> None:
        """Read `sequence` (length,) without its last token, up to the model's maximum length."""
        self._prefill(self._own(sequence))

    def _own(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return a sequence as tokens of this model."""
        return sequence

    def _prefill(self, sequence: torch.Tensor) -> None:
        if self._reach(len(sequence)) > 0 and len(sequence) - 1 > self.cached:
            prefill(self.model, [self._with_embeddings(sequence)], self._cache)
            self.cached = len(sequence) - 1

    def reach(self, sequence: torch.Tensor) -> int:
        """Return how many layers may be drafted below `sequence` (length,) before the model's positions end."""
        return self._reach(len(self._own(sequence)))

    def _reach(self, length: int) -> int:
        limit = self.model.max_length
        return sys.maxsize if limit is None else limit - length + 1

    def read(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return logits (1, vocabulary) after `sequence` (length,), which continues or equals the previous one."""
        sequence = self._own(sequence)
        prefixes, self.prefixes = self.prefixes, None
        if prefixes is not None:
            self._cache, self.cached = prefixes.take(sequence)
        if self._nodes > 1:
            self.keep([])
        if self.cached == len(sequence):  # the same sequence again
            self.cached -= 1
            self._cache.keep(self.cached, [self.cached], [[]])
        if len(sequence) - self.cached > _AT_ONCE:
            self._prefill(sequence)
        new = self._with_embeddings(sequence[self.cached :])
        logits = self._forward(self.model.inputs.of_text(new, self.cached))
        self.cached = len(sequence)
        self._forget()
        if prefixes is not None:
            prefixes.keep(sequence, self._cache)
        return logits[-1:]

    def read_layer(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return logits (n, vocabulary) after n nodes, each below the node read as number `parents[i]`; root: 0."""
        below, new = torch.tensor([parents, tokens], device=self.model.device)
        new = self._with_embeddings(new)
        visible = torch.cat([self._visible[below], torch.eye(len(new), dtype=torch.bool, device=below.device)], dim=1)
        self._depths = torch.cat([self._depths, self._depths[below] + 1])
        self._is_chain &= list(parents) == [self._nodes - 1]
        if self._is_chain:
            begin = self.cached - 1 + self._nodes
            inputs = self.model.inputs.of_text(new, begin)
        else:
            inputs = self.model.inputs.of_layer(new, visible, self._depths, self.cached - 1)
        self._visible = torch.cat([torch.nn.functional.pad(self._visible, (0, len(new))), visible])
        self._nodes += len(new)
        return self._forward(inputs)

    def _forward(self, inputs: PassInputs) -> torch.Tensor:
        if not self._wants_states:
            return self.model.forward(inputs, self._cache)[0]
        with layer_states(self.model.model, last_state(self.model.config.num_hidden_layers)) as states:
            logits = self.model.forward(inputs, self._cache)
        self.states = states[-1][0].to(self.model.device)
        return logits[0]

    def keep(self, nodes: Sequence[int]) -> None:
        """Keep the nodes of an accepted path from the root, given by order of reading."""
        self._cache.keep(self.cached - 1, [self.cached - 1], [[0, *nodes]])
        self.cached += len(nodes)
        self._forget()

    def _forget(self) -> None:
        self._nodes, self._is_chain = 1, True
        self._visible, self._depths = self._root_visible, self._root_depth

    def _with_embeddings(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace tokens without an embedding by the last token that has one."""
        return tokens.to(self.model.device).clamp(max=self.model.embedded - 1)
