"""Token Recycling as published (Luo et al., 2408.08696): drafts consist of the candidates of earlier steps.

Before each step a breadth-first walk of the adjacency matrix fills a static tree (section 3.2). After it, the top-k
candidates at every node, rejected ones included, overwrite the rows of their tokens (section 3.3). There is no
training, and the matrix is kept across sequences.

Cost per step: one gather per tree layer, one top-k over the logits of all nodes, one write of n rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch

from .._util.locks import Lock
from ..model.target import Target
from ..recycling.matrix_file import check_header, read_matrix_file, write_matrix
from ..recycling.sizes import check_sizes, check_vocabulary, fitting
from ..trees.draft import Context, Draft, Step
from ..trees.templates import Template, template_from
from ._base import Drafter, DrafterTraits, SequenceDrafter, check_at_least

UpdateRule = Literal["last", "first", "unordered"]
_CHUNK = 256


@dataclass
class Published(Drafter):
    """Drafts from the adjacency matrix."""

    k: int = 8
    """Candidates kept per token."""
    tree: str | Template = "paper"
    """A template: paper (80 nodes), chain:N, static:N, rank paths, or a file of them."""
    update: UpdateRule = "last"
    """Which node wins if a token occurs at several: last, first or unordered."""
    matrix: AdjacencyMatrix | None = field(default=None, init=False)
    """The adjacency matrix; created with the first sequence."""

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

    def fit_again(self, target: Target) -> None:
        self.prepare(target)

    def start(self, prompt: torch.Tensor, target: Target) -> PublishedSequence:
        return PublishedSequence(self, self.prepare(target))

    def prepare(self, target: Target) -> AdjacencyMatrix:
        """Return the matrix for this target: an empty one if the vocabulary size has changed."""
        with self._making:
            matrix = fitting(self.matrix, target.vocab_size)
            self.matrix = matrix or AdjacencyMatrix(target.vocab_size, self.k, target.device)
            self.matrix.storage = self.matrix.storage.to(target.device)
            return self.matrix

    def describe(self) -> str:
        return f"published: k = {self.k}, {self.template}, update rule {self.update}"


class PublishedSequence(SequenceDrafter):
    """One sequence that drafts from the matrix and updates it."""

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
        logits = step.logits[nodes].float()
        self.matrix.update(tokens, logits.topk(self.matrix.k, dim=-1).indices, self.drafter.update)


class AdjacencyMatrix:
    """For every vocabulary token, the k candidates that the model computed last after it (Token Recycling, section
    3.1): `candidates` (vocab_size, k) int32, best first, zero if nothing was learned.

    The matrix is kept across requests (*hot start*), and takes vocabulary x k x 4 bytes: 1 MB for 32,000 tokens and k =
    8. The row of a token is overwritten whenever the token was verified anywhere in a tree. Reading and writing n rows
    takes a few tensor operations, without synchronizing with the device.
    """

    def __init__(self, vocab_size: int, k: int = 8, device: torch.device | str = "cpu") -> None:
        check_sizes(vocab_size, k)
        with torch.inference_mode(False):  # updated both within and outside inference mode
            self.storage = torch.zeros(vocab_size + 1, k, dtype=torch.int32, device=device)
            """(vocab_size + 1, k): the last row is shared by prompt ids that have an embedding but no output."""

    @property
    def candidates(self) -> torch.Tensor:
        """(vocab_size, k) int32, a view."""
        return self.storage[:-1]

    @property
    def vocab_size(self) -> int:
        return self.storage.shape[0] - 1

    @property
    def k(self) -> int:
        return self.storage.shape[1]

    @property
    def filled(self) -> torch.Tensor:
        """(vocab_size,) bool: learned rows."""
        return self.candidates.any(dim=1)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def __repr__(self) -> str:
        return f"AdjacencyMatrix({self.vocab_size:,} tokens x {self.k}, {int(self.filled.sum()):,} rows filled)"

    def look_up(self, tokens: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Return the candidate of the given rank after each token; all (n,) int64."""
        return self.storage[self._rows_of(tokens), ranks].long()

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the candidates (n, k) int32 after tokens (n,)."""
        return self.storage[self._rows_of(tokens)]

    def _rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.clamp(max=self.vocab_size)

    def fill(self, template: Template, root: torch.Tensor) -> torch.Tensor:
        """Return the tokens (n,) int64 of a template: `root` (1,), and for every other node the candidate of its rank
        after its parent (Token Recycling, section 3.2). On a CPU it is filled node by node: an operation costs more
        than a small layer.
        """
        if self.storage.device.type == "cpu":
            cells, tokens, last = self.storage.numpy().data, root.tolist(), self.vocab_size
            for parent, rank in zip(template.parents.tolist()[1:], template.ranks.tolist()[1:], strict=True):
                tokens.append(cells[min(tokens[parent], last), rank])
            return torch.tensor(tokens)
        return self.fill_by_layers(template, root)

    def fill_by_layers(self, template: Template, root: torch.Tensor) -> torch.Tensor:
        """Do the same as `fill`, with tensor operations of static shapes, on any device."""
        parents, ranks = (torch.from_numpy(array).to(root.device) for array in (template.parents, template.ranks))
        tokens, ends = root.repeat(len(template)), np.bincount(template.depths).cumsum().tolist()
        for nodes in map(slice, ends[:-1], ends[1:]):
            tokens[nodes] = self.look_up(tokens[parents[nodes]], ranks[nodes])
        return tokens

    def update(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule = "last") -> None:
        """Overwrite the rows of `tokens` (n,) with `candidates` (n, k), best first.

        If a token occurs several times, `last` keeps its last row and `first` its first, on every device. `unordered`
        is a parallel write whose winner CUDA does not define (Token Recycling, section 4.4 compares the three).
        """
        if self.storage.device.type == "cpu":
            # numpy assigns in order: the last row of a token stays.
            order = -1 if rule == "first" else 1
            self.storage.numpy()[self._rows_of(tokens).numpy()[::order]] = candidates.numpy()[::order]
        else:
            self.write(tokens, candidates, rule)

    def write(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule = "last") -> None:
        """Do the same as `update`, with tensor operations of static shapes: all rows of a token write the winner's."""
        tokens = self._rows_of(tokens)
        if rule == "unordered":
            self.storage[tokens] = candidates.to(self.storage.dtype)
            return
        pieces = list(zip(tokens.split(_CHUNK), candidates.split(_CHUNK), strict=True))
        for some, rows in pieces if rule == "last" else reversed(pieces):
            same, places = some[:, None] == some, torch.arange(len(some), device=some.device)
            last = rule == "last"
            winner = torch.where(same, places, -1).amax(1) if last else torch.where(same, places, _CHUNK).amin(1)
            self.storage[some] = rows[winner].to(self.storage.dtype)

    def save(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Write a safetensors file atomically. `tokenizer` is the `fingerprint` of the tokenizer."""
        write_matrix(path, {"candidates": self.candidates.cpu().numpy()}, tokenizer)

    def load(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Replace the contents by those of a file; after an error the matrix is unchanged. Raises MatrixFileError for a
        damaged file, or one with another format, vocabulary, k or tokenizer.
        """
        tensors, header = read_matrix_file(path)
        check_header(path, {"vocab_size": self.vocab_size, "k": self.k, "tokenizer": tokenizer}, header)
        self.candidates.copy_(torch.from_numpy(tensors["candidates"]))


def matrix_in(tensors: Mapping[str, np.ndarray]) -> AdjacencyMatrix:
    """Return the adjacency matrix stored in the tensors of a file."""
    matrix = AdjacencyMatrix(*tensors["candidates"].shape)
    matrix.candidates.copy_(torch.from_numpy(tensors["candidates"]))
    return matrix
