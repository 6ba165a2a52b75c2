"""Drafting with a module that reads the target's hidden states: EAGLE heads, MTP layers, a DFlash assistant.

Modules that predict all positions at once give trees in which the candidates of a position are children of every
candidate of the preceding position (`product_draft`; Medusa, section 2.1.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicLayer

from ...model.tree_layer import TreeLayer
from ...trees.draft import Draft, Step
from ...trees.templates import Template, best_paths, nodes_of, size_description, tree_of
from .._base import SequenceDrafter
from .neural import NeuralDrafter, T


def appending(cache: Cache) -> Cache:
    """Return an empty cache, changed to append keys and values in place: layers of transformers copy all of them in
    every pass. Layers with a window or with other states stay as they are.
    """
    cache.layers[:] = [TreeLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = TreeLayer
    return cache


class PendingStates:
    """The target's hidden states (n, ...) at consecutive tokens that the module has not read yet."""

    def __init__(self, prompt: int) -> None:
        self._pending: list[torch.Tensor] = []
        self._next = self.begin = prompt - 1
        """Position of the first pending state, and of the first token with known states."""

    def read_prompt(self, states: torch.Tensor) -> None:
        """Append the next states of the tokens before the prompt's last one."""
        self._pending.append(states)
        self._next = self.begin = self.begin - len(states)

    def learn(self, states: torch.Tensor) -> None:
        """Append the states of the next tokens, all but the newest."""
        self._pending.append(states)

    @property
    def waits(self) -> bool:
        return any(map(len, self._pending))

    def taken(self) -> torch.Tensor:
        """Return and clear all pending states."""
        states, self._pending = torch.cat(self._pending), []
        return states


class StatesDrafter(NeuralDrafter[T]):
    """A drafter whose module reads the target's hidden states."""

    tree: str | int
    """auto: as many nodes as pay, the module's passes included; a number of nodes; or a subclass's own values."""
    k: int
    template: Template | None = None
    """The template selected by the option; None if the tree grows."""

    def check_template(self, depth: int, layers: str) -> None:
        """Raise ValueError for a template deeper than `depth`, described as `layers`, or with ranks of `k` or more."""
        template = self.template
        if template is not None and (template.depth > depth or template.breadth > self.k):
            raise ValueError(
                f"the tree may have at most {layers} and ranks below k={self.k}, got {template} with ranks up to "
                f"{template.breadth - 1}; use a smaller tree or larger options"
            )

    @property
    def nodes(self) -> int | Literal["auto"] | None:
        """Number of nodes to verify: see `DrafterTraits.nodes`."""
        return nodes_of(self.tree, self.template)

    def tree_description(self) -> str:
        """Return a description of the draft."""
        return size_description(self.tree, self.template)


class StatesSequence(SequenceDrafter):
    """Drafts for one sequence from hidden states."""

    pass_cost = 0.02

    def __init__(self, drafter: StatesDrafter[Any], pending: PendingStates) -> None:
        super().__init__(drafter)
        self._pending = pending
        self._counts: Counter[str] = Counter()

    def read_prompt(self, states: torch.Tensor) -> None:
        self._pending.read_prompt(states)

    def observe(self, step: Step) -> None:
        assert step.states is not None
        self._pending.learn(step.states[step.accepted])

    def statistics(self) -> Mapping[str, float]:
        counts, self._counts = self._counts, Counter()
        return counts


def best_product(acceptance: Sequence[Sequence[float]], nodes: int) -> Template:
    """Return the best tree of `nodes` nodes if the candidate of rank r at depth d is correct with probability
    `acceptance[d - 1][r]`.
    """
    return tree_of(islice(best_paths(acceptance), nodes))


def product_draft(template: Template, root: torch.Tensor, candidates: np.ndarray, probabilities: np.ndarray) -> Draft:
    """Return `template` below `root` (1,), filled with the candidates of each position (positions, k) and their
    probabilities.
    """
    chosen = template.depths[1:] - 1, template.ranks[1:]
    tokens = np.append(int(root), candidates[chosen])
    return Draft(tokens, template.parents, np.append(np.float32(1), probabilities[chosen]))
