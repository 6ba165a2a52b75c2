"""The adjacency matrix: after every vocabulary token, the k candidates that the model computed last.

Token Recycling, section 3.1. The matrix starts at zero, is kept from query to query (*hot start*), and takes vocabulary
x k x 4 bytes: 1 MB for 32,000 tokens and k = 8. The row of a token is overwritten whenever it was verified anywhere in
a tree. Reading and writing n rows takes a few tensor operations, without synchronizing with the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from ..trees.templates import Template
from .matrix_file import check_header, check_sizes, read_matrix_file, write_matrix

UpdateRule = Literal["last", "first", "unordered"]
_CHUNK = 256


class AdjacencyMatrix:
    """Candidates after every token: `candidates` (vocab_size, k) int32, best first, zero where nothing was learned."""

    def __init__(self, vocab_size: int, k: int = 8, device: torch.device | str = "cpu") -> None:
        check_sizes(vocab_size, k)
        with torch.inference_mode(False):  # updated within inference mode and outside, wherever it was made
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
        """(vocab_size,) bool: rows that were learned."""
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
        after its parent (Token Recycling, section 3.2). On a CPU node by node, since an operation costs more than a
        small layer.
        """
        if self.storage.device.type == "cpu":
            cells, tokens, last = self.storage.numpy().data, root.tolist(), self.vocab_size
            for parent, rank in zip(template.parents.tolist()[1:], template.ranks.tolist()[1:], strict=True):
                tokens.append(cells[min(tokens[parent], last), rank])
            return torch.tensor(tokens)
        return self.fill_by_layers(template, root)

    def fill_by_layers(self, template: Template, root: torch.Tensor) -> torch.Tensor:
        """As `fill`, in tensor operations of fixed shapes, on any device."""
        parents, ranks = (torch.from_numpy(array).to(root.device) for array in (template.parents, template.ranks))
        tokens, ends = root.repeat(len(template)), np.bincount(template.depths).cumsum().tolist()
        for nodes in map(slice, ends[:-1], ends[1:]):
            tokens[nodes] = self.look_up(tokens[parents[nodes]], ranks[nodes])
        return tokens

    def update(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule = "last") -> None:
        """Overwrite the rows of `tokens` (n,) with `candidates` (n, k), best first.

        Of a token's rows `last` keeps the last, `first` the first, on every device; `unordered` is a parallel write
        whose winner CUDA does not define (Token Recycling, section 4.4 compares the three).
        """
        if self.storage.device.type == "cpu":
            # numpy assigns in order: the last row of a token stays.
            order = -1 if rule == "first" else 1
            self.storage.numpy()[self._rows_of(tokens).numpy()[::order]] = candidates.numpy()[::order]
        else:
            self.write(tokens, candidates, rule)

    def write(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule = "last") -> None:
        """As `update`, in tensor operations of fixed shapes: all places of a token write the winner's row."""
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
        damaged file, or another format, vocabulary, k or tokenizer.
        """
        tensors, header = read_matrix_file(path)
        check_header(path, {"vocab_size": self.vocab_size, "k": self.k, "tokenizer": tokenizer}, header)
        self.candidates.copy_(torch.from_numpy(tensors["candidates"]))


def read_matrix(path: str | os.PathLike[str]) -> tuple[AdjacencyMatrix, dict[str, str]]:
    """Return a saved matrix of single tokens and its header; raises MatrixFileError or FileNotFoundError."""
    tensors, header = read_matrix_file(path)
    return matrix_in(tensors), header


def matrix_in(tensors: Mapping[str, np.ndarray]) -> AdjacencyMatrix:
    """Return the adjacency matrix among the tensors of a file."""
    matrix = AdjacencyMatrix(*tensors["candidates"].shape)
    matrix.candidates.copy_(torch.from_numpy(tensors["candidates"]))
    return matrix
