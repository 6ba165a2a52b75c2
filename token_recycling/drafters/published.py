"""Token Recycling as published (Luo et al., 2408.08696): the candidates of earlier steps are the draft.

Before each step a breadth-first walk of the adjacency matrix fills a static tree (section 3.2); after it, the top-k
candidates at every node, rejected ones included, overwrite the rows of their tokens (section 3.3). There is no
training, and the matrix is kept from sequence to sequence.

Cost per step: one gather per tree layer, one top-k over the logits of all nodes, one write of n rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import torch

from .._util.locks import Lock
from ..model.target import Target
from ..recycling.matrix import AdjacencyMatrix, UpdateRule
from ..recycling.matrix_file import check_vocabulary, say_that_it_starts_again
from ..trees.draft import Context, Draft, Step
from ..trees.templates import Template, template_from
from ._base import Drafter, DrafterTraits, SequenceDrafter, check_at_least


@dataclass
class Published(Drafter):
    """Drafts from the adjacency matrix."""

    k: int = 8
    """Candidates kept after every token."""
    tree: str | Template = "paper"
    """A template: paper (80 nodes), chain:N, static:N, rank paths, or a file of them."""
    update: UpdateRule = "last"
    """Which node wins where a token is at several: last, first or unordered."""
    matrix: AdjacencyMatrix | None = field(default=None, init=False)
    """The adjacency matrix; made with the first sequence."""

    def __post_init__(self) -> None:
        if self.update not in get_args(UpdateRule):
            raise ValueError(f"update must be one of {', '.join(get_args(UpdateRule))}, got {self.update!r}")
        check_at_least(1, self, "k")
        template = template_from(self.tree)
        if template is None:
            raise ValueError(f"tree must be a template, got {self.tree}; trees are grown by the drafter 'recycling'")
        self.template = template
        if template.breadth > self.k:
            raise ValueError(
                f"ranks of the tree must be below k={self.k}, got rank {template.breadth - 1}; "
                "raise k or choose another tree"
            )
        self._making = Lock()

    @property
    def traits(self) -> DrafterTraits:
        return DrafterTraits(reproducible=True)

    def fit(self, target: Target) -> None:
        if self.matrix is not None:
            check_vocabulary(self.matrix.vocab_size, target.vocab_size)
            self.prepare(target)

    def start(self, prompt: torch.Tensor, target: Target) -> PublishedSequence:
        return PublishedSequence(self, self.prepare(target))

    def prepare(self, target: Target) -> AdjacencyMatrix:
        """Return the matrix for this target: an empty one where the vocabulary has another size than before."""
        with self._making:
            if self.matrix is not None and self.matrix.vocab_size != target.vocab_size:
                say_that_it_starts_again(self.matrix.vocab_size, target.vocab_size)
                self.matrix = None
            if self.matrix is None:
                self.matrix = AdjacencyMatrix(target.vocab_size, self.k, target.device)
            self.matrix.storage = self.matrix.storage.to(target.device)
            return self.matrix

    def describe(self) -> str:
        return f"published: k = {self.k}, {self.template}, update rule {self.update}"


class PublishedSequence(SequenceDrafter):
    """One sequence that drafts from the matrix and fills it."""

    drafter: Published

    def __init__(self, drafter: Published, matrix: AdjacencyMatrix) -> None:
        super().__init__(drafter)
        self.matrix = matrix

    def draft(self, context: Context) -> Draft:
        template = self.drafter.template
        return Draft(self.matrix.fill(template, context.root), template.parents)

    def observe(self, step: Step) -> None:
        nodes = step.learnable
        tokens = torch.from_numpy(step.draft.tokens[nodes]).to(step.logits.device)
        logits = step.logits[nodes]
        self.matrix.update(tokens, logits.topk(self.matrix.k, dim=-1).indices, self.drafter.update)
