"""Candidates after n-grams: the adjacency matrix with probabilities, and rows for longer n-grams.

Beyond the matrix of Token Recycling (section 3.1), each row has the candidates' probabilities, and there are rows for
the last two, three or four tokens, in a hash table of fixed size where newer n-grams replace older ones. Probabilities
have 16 bits: 32,000 tokens with 8 candidates take 1.5 MB. `memory` sets the size of the table. The arrays are on the
CPU, where trees are grown. Learning an n-gram takes a fraction of a microsecond per order, in compiled code.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .._util.compiled import compiled
from .._util.topk import exceeded, top_candidates
from .calibration import OUTCOMES
from .mixture import Mixture, mixture_calibration
from .ngrams import FULL, Rows, find_row, key_of, row_of
from .sizes import check_sizes
from .suffix_index import SuffixIndex

if TYPE_CHECKING:
    import torch

MAX_ORDER = 4


def check_options(k: int, orders: int, memory: float, history: int) -> None:
    """Raise ValueError unless a matrix can have these sizes; see `NgramMatrix` for their meaning."""
    if k < 1:
        raise ValueError(f"k must be >= 1, got {k}")
    if not 1 <= orders <= MAX_ORDER:
        raise ValueError(f"orders must be from 1 to {MAX_ORDER}, got {orders}")
    if not 0 <= memory < math.inf:
        raise ValueError(f"memory must be >= 0 MB, got {memory}")
    if history < 0:
        raise ValueError(f"history must be >= 0, got {history}")


class NgramMatrix:
    """Candidates and probabilities after the last one to `orders` tokens, learned from verified drafts."""

    def __init__(self, vocab_size: int, k: int = 8, orders: int = 3, memory: float = 16.0, history: int = 0) -> None:
        """`memory`: megabytes for longer n-grams; `history`: tokens of past outputs (20 bytes). Raises ValueError."""
        check_sizes(vocab_size, k)
        check_options(k, orders, memory, history)
        self.vocab_size, self.k, self.orders = vocab_size, k, orders
        hashed = int(memory * 1_000_000) // (8 + 6 * k) if orders > 1 else 0
        self.rows = Rows(
            candidates=np.zeros((vocab_size + hashed, k), np.int32),
            shares=np.zeros((vocab_size + hashed, k), np.uint16),
            keys=np.zeros(hashed, np.int64),
        )
        self.calibration = mixture_calibration()
        self.workspace = Mixture.empty(orders, k)
        """Used by one draft at a time, for all sequences: compiled code is not interrupted."""
        self.outcomes = np.zeros(1, OUTCOMES)
        """Outcomes of chains of all sequences."""
        self.least_gain = 0.0
        """Gain above which nodes would have paid in the last batch of sequences."""
        self.lessons = 0
        """Number of rows learned so far."""
        self.history = SuffixIndex(capacity=history)
        """Outputs of all sequences, up to its capacity."""

    @property
    def candidates(self) -> np.ndarray:
        """(vocab_size, k) int32: the adjacency matrix, best first."""
        return self.rows.candidates[: self.vocab_size]

    @property
    def shares(self) -> np.ndarray:
        """(vocab_size, k) uint16: their probabilities, 65,535 for 1."""
        return self.rows.shares[: self.vocab_size]

    @property
    def filled(self) -> np.ndarray:
        """(vocab_size,) bool: tokens with a learned row."""
        return self.shares[:, 0] > 0

    @property
    def ngrams(self) -> int:
        """Number of known n-grams of two tokens and more."""
        return int((self.rows.keys > 0).sum())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.rows, *self.history.arrays))

    def __repr__(self) -> str:
        return (
            f"NgramMatrix({self.vocab_size:,} tokens x {self.k}, {int(self.filled.sum()):,} rows filled, "
            f"{self.ngrams:,} of {len(self.rows.keys):,} longer contexts)"
        )

    def look_up(self, *ngram: int) -> list[tuple[int, float]]:
        """Return candidates and probabilities after the last tokens, newest last; raises ValueError beyond `orders`."""
        if not 1 <= len(ngram) <= self.orders:
            raise ValueError(f"an n-gram must have 1 to {self.orders} tokens, got {len(ngram)}")
        newest_first = np.array(ngram[::-1], np.int64)
        row = row_of(self.rows, newest_first, len(ngram))
        if row < 0:
            return []
        shares = self.rows.shares[row] / FULL
        return [(int(token), float(p)) for token, p in zip(self.rows.candidates[row], shares, strict=True)]

    def learn(self, ngrams: np.ndarray, candidates: np.ndarray, probabilities: np.ndarray) -> None:
        """Overwrite the rows of n n-grams in order: of equal n-grams the last one wins.

        `ngrams` is (n, orders) int64, newest token first, -1 before the beginning of a sequence; `candidates` and
        `probabilities` are (n, k), best first. Raises ValueError for another number of rows or of candidates.
        """
        shape = (len(ngrams), self.k)
        if candidates.shape != shape or probabilities.shape != shape:
            raise ValueError(
                f"candidates and probabilities must be {shape[0]} x {shape[1]}, "
                f"got {candidates.shape} and {probabilities.shape}"
            )
        # Another dtype or memory layout would trigger another compilation.
        arrays, types = (ngrams, candidates, probabilities), (np.int64, np.int32, np.float32)
        overwrite(self.rows, *map(np.ascontiguousarray, arrays, types))
        self.lessons += len(ngrams)

    def learn_logits(self, ngrams: np.ndarray, logits: np.ndarray | torch.Tensor) -> None:
        """Learn from the target's logits (n, vocabulary) after those n-grams (n, orders) whose rows would change."""
        rows = None
        if isinstance(logits, np.ndarray) or logits.device.type == "cpu":  # elsewhere copying all is cheaper
            logits = logits if isinstance(logits, np.ndarray) else logits.float().numpy()
            rows = self.mispredicted(ngrams, logits)
            ngrams = ngrams[rows]
        if len(ngrams):
            self.learn(ngrams, *top_candidates(logits, self.k, rows))

    def predicts(self, ngrams: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return for each n-gram (n, orders) whether its row has `chosen` (n,) first, bool (n,); -1 is unknown."""
        result = np.zeros(len(ngrams), np.bool_)
        predicts(self.rows, np.ascontiguousarray(ngrams, np.int64), np.ascontiguousarray(chosen, np.int64), result)
        return result

    def mispredicted(self, ngrams: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """Return the indices (m,) int64 of the n-grams (n, orders) whose rows do not start with the argmax of logits
        (n, vocabulary).
        """
        result = np.zeros(len(ngrams), np.bool_)
        mark_mispredicted(
            self.rows, np.ascontiguousarray(ngrams, np.int64), np.ascontiguousarray(logits, np.float32), result
        )
        return np.flatnonzero(result)

    def save(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Write a safetensors file; see `AdjacencyMatrix.save`."""
        from .matrix_file import write_matrix

        filled = np.flatnonzero(self.rows.keys > 0)
        tensors = {
            "candidates": self.candidates,
            "shares": self.shares,
            "context_candidates": self.rows.candidates[self.vocab_size + filled],
            "context_shares": self.rows.shares[self.vocab_size + filled],
            "context_keys": self.rows.keys[filled],
            "calibration": self.calibration,
            "history": self.history.tokens,
        }
        write_matrix(path, tensors, tokenizer, orders=self.orders)

    def load(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Load a file of the same orders, as `AdjacencyMatrix.load` does; keep as many contexts and history tokens as
        fit.
        """
        from .matrix_file import read_ngram_matrix

        expected = {"vocab_size": self.vocab_size, "k": self.k, "orders": self.orders, "tokenizer": tokenizer}
        tensors = read_ngram_matrix(path, expected, self.calibration)
        self.calibration[:] = tensors["calibration"]
        self.candidates[:], self.shares[:] = tensors["candidates"], tensors["shares"]
        self.rows.keys[:] = 0
        if len(self.rows.keys):
            keys = tensors["context_keys"]
            slots = keys % len(self.rows.keys)
            self.rows.keys[slots] = keys
            self.rows.candidates[self.vocab_size + slots] = tensors["context_candidates"]
            self.rows.shares[self.vocab_size + slots] = tensors["context_shares"]
        self.history = SuffixIndex(tensors["history"], capacity=self.history.capacity)


@dataclass(kw_only=True)
class Options:
    """Sizes and sources of the recycler, of the drafter and of all engines."""

    k: int = 8
    """Candidates kept after every context."""
    orders: int = 3
    """Longest context in tokens, 1 to 4; 1 is the adjacency matrix of the paper."""
    memory: float = 16.0
    """Megabytes for contexts of two tokens and more: some 290,000 of them."""
    suffix: bool = True
    """Draft continuations of earlier occurrences of the last tokens in the sequence."""
    history: int = 1_048_576
    """Tokens of earlier outputs to keep, whose continuations are drafted too; up to 20 MB."""

    def __post_init__(self) -> None:
        check_options(self.k, self.orders, self.memory, self.history)

    def new_matrix(self, vocab_size: int) -> NgramMatrix:
        """Return an empty matrix of these sizes; raises ValueError for more candidates than tokens."""
        return NgramMatrix(vocab_size, self.k, self.orders, self.memory, self.history)


@compiled(allocates=False)
def overwrite(rows: Rows, ngrams: np.ndarray, candidates: np.ndarray, probabilities: np.ndarray) -> None:
    """See `NgramMatrix.learn`."""
    vocab_size = len(rows.candidates) - len(rows.keys)
    for node in range(len(ngrams)):
        if ngrams[node, 0] >= vocab_size:  # has an embedding but is never emitted: no row
            continue
        for order in range(1, ngrams.shape[1] + 1):
            if ngrams[node, order - 1] < 0 or (order > 1 and len(rows.keys) == 0):
                break
            row = ngrams[node, 0]
            if order > 1:
                key = key_of(ngrams[node], order)
                row = vocab_size + key % len(rows.keys)
                rows.keys[row - vocab_size] = key
            for rank in range(candidates.shape[1]):
                share = min(probabilities[node, rank], np.float32(1.0))
                rows.candidates[row, rank] = candidates[node, rank]
                rows.shares[row, rank] = np.uint16(share * FULL + np.float32(0.5))
            if not rows.shares[row, 0]:
                rows.shares[row, 0] = 1


@compiled(allocates=False)
def predicts(rows: Rows, ngrams: np.ndarray, chosen: np.ndarray, result: np.ndarray) -> None:
    """Fill in the `result` of `NgramMatrix.predicts`."""
    for node in range(len(ngrams)):
        if chosen[node] >= 0:
            row = find_row(rows, ngrams[node], ngrams.shape[1])
            result[node] = row >= 0 and rows.candidates[row, 0] == chosen[node]


@compiled(allocates=False)
def mark_mispredicted(rows: Rows, ngrams: np.ndarray, logits: np.ndarray, result: np.ndarray) -> None:
    """Fill in for each n-gram whether its row does not start with the argmax of its logits; see
    `NgramMatrix.mispredicted`.
    """
    for node in range(len(ngrams)):
        row = find_row(rows, ngrams[node], ngrams.shape[1])
        result[node] = row < 0 or exceeded(logits, node, logits[node, rows.candidates[row, 0]])
