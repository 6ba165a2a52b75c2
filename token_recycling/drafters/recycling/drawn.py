"""The distributions that the tokens of a draft were drawn from, as acceptance needs them.

Drafts with drawn tokens are accepted by their distributions, which keeps that of the text (STAND, 2506.04708; Leviathan
et al., 2211.17192). What may follow a node is known of 16 tokens at most; it is spread over the vocabulary only for the
nodes that acceptance reaches, two or three a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from ...recycling.nodes import GrowingTree


class DrawnFrom(Mapping[int, torch.Tensor]):
    """For each node after the root a distribution (vocabulary,) float32: `Draft.drawn_from`."""

    def __init__(self, tree: GrowingTree, parents: np.ndarray, vocab_size: int) -> None:
        """`parents` (n,): in `tree`, of all nodes in their order in the draft."""
        self._parents, self._vocab_size = parents, vocab_size
        self._tokens, self._chances = tree.candidates.copy(), tree.chances.copy()
        self._known = tree.known.copy()

    def __getitem__(self, node: int) -> torch.Tensor:
        parent = self._parents[node]
        known = slice(0, self._known[parent])
        chances = torch.zeros(self._vocab_size)
        chances[torch.from_numpy(self._tokens[parent, known])] = torch.from_numpy(self._chances[parent, known])
        return chances / chances.sum()

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, len(self._parents)))

    def __len__(self) -> int:
        return len(self._parents) - 1
