"""The adjacency matrix: after every vocabulary token, the k candidates that the model last gave for what follows.

Token Recycling, section 3.1. The matrix is zero at first, is kept from query to query (*hot start*), and costs
vocabulary x k x 4 bytes: 1 MB for 32,000 tokens and k = 8. A row is overwritten whole whenever its token has been
verified anywhere in a tree. Looking up and writing n rows are a few tensor operations, without waiting for the device.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from ..trees.tree import Tree
from .matrix_file import check_header, check_sizes, read_matrix_file, write_matrix

UpdateRule = Literal["last", "first", "unordered"]
_CHUNK = 256


class AdjacencyMatrix:
    """Candidates after every token: `candidates` (vocab_size, k) int32, best first, zero where nothing was learned."""

    def __init__(self, vocab_size: int, k: int = 8, device: torch.device | str = "cpu") -> None:
        check_sizes(vocab_size, k)
        with torch.inference_mode(False):  # it is learned into within that mode and outside, wherever it was made
            self.storage = torch.zeros(vocab_size + 1, k, dtype=torch.int32, device=device)
            """(vocab_size + 1, k): the last row is shared by ids of a prompt that have an embedding and no output."""

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
        """(vocab_size,) bool: the rows that something was learned for."""
        return self.candidates.any(dim=1)

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes

    def __repr__(self) -> str:
        return f"AdjacencyMatrix({self.vocab_size:,} tokens x {self.k}, {int(self.filled.sum()):,} rows filled)"

    def look_up(self, tokens: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """The candidate of the given rank after each token; all (n,) int64."""
        return self.storage[self._rows_of(tokens), ranks].long()

    def rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """(n, k) int32: the candidates after tokens (n,)."""
        return self.storage[self._rows_of(tokens)]

    def _rows_of(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.clamp(max=self.vocab_size)

    def fill(self, tree: Tree, root: torch.Tensor) -> torch.Tensor:
        """The tokens (n,) int64 of a tree: `root` (1,), and every other node the candidate of its rank after its parent
        (Token Recycling, section 3.2); on a CPU, where an operation costs more than a small layer, node by node.
        """
        if self.storage.device.type == "cpu":
            cells, tokens, last = self.storage.numpy().data, root.tolist(), self.vocab_size
            for parent, rank in zip(tree.parents[1:], tree.ranks[1:], strict=True):
                tokens.append(cells[min(tokens[parent], last), rank])
            return torch.tensor(tokens)
        return self.fill_by_layers(tree, root)

    def fill_by_layers(self, tree: Tree, root: torch.Tensor) -> torch.Tensor:
        """As `fill`, in tensor operations of known shapes alone, whatever the device."""
        shape, tokens = tree.on(root.device), root.repeat(len(tree))
        for layer in tree.layers:
            nodes = slice(layer[0], layer[-1] + 1)
            tokens[nodes] = self.look_up(tokens[shape.parents[nodes]], shape.ranks[nodes])
        return tokens

    def update(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule = "last") -> None:
        """Overwrites the rows of `tokens` (n,) with `candidates` (n, k), best first.

        Of a token's rows `last` keeps the last, `first` the first, on every device; `unordered` is a parallel write
        whose winner CUDA does not define (Token Recycling, section 4.4 compares the three).
        """
        if self.storage.device.type == "cpu":
            # numpy assigns in order, so that the last row of a token stays.
            order = -1 if rule == "first" else 1
            self.storage.numpy()[self._rows_of(tokens).numpy()[::order]] = candidates.numpy()[::order]
        else:
            self.write(tokens, candidates, rule)

    def write(self, tokens: torch.Tensor, candidates: torch.Tensor, rule: UpdateRule = "last") -> None:
        """As `update`, in tensor operations of known shapes: every place of a token writes the winner's row."""
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
        """Writes a safetensors file atomically. `tokenizer` is the `fingerprint` of the one whose ids these are."""
        write_matrix(path, {"candidates": self.candidates.cpu().numpy()}, tokenizer)

    def load(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Replaces the contents by those of a file; after any error the matrix is as it was. Raises MatrixFileError for
        a damaged file, or one of another format, vocabulary, k or tokenizer.
        """
        tensors, header = read_matrix_file(path)
        check_header(path, {"vocab_size": self.vocab_size, "k": self.k, "tokenizer": tokenizer}, header)
        self.candidates.copy_(torch.from_numpy(tensors["candidates"]))


def read_matrix(path: str | os.PathLike[str]) -> tuple[AdjacencyMatrix, dict[str, str]]:
    """A saved matrix of single tokens and its header; raises MatrixFileError or FileNotFoundError."""
    tensors, header = read_matrix_file(path)
    return matrix_in(tensors), header


def matrix_in(tensors: Mapping[str, np.ndarray]) -> AdjacencyMatrix:
    """The matrix of the tensors of a file, whatever else they hold."""
    matrix = AdjacencyMatrix(*tensors["candidates"].shape)
    matrix.candidates.copy_(torch.from_numpy(tensors["candidates"]))
    return matrix
