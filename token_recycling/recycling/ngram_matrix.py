"""Candidates after n-grams: the adjacency matrix with probabilities, and rows for longer n-grams.

Beyond the matrix of Token Recycling (section 3.1) every row holds the candidates' probabilities too, and more rows are
kept for the last two, three or four tokens, in a table of fixed size: a row's place is a hash of its tokens, and a
newer n-gram takes the place of an older one. Probabilities have 16 bits, so that 32,000 tokens with 8 candidates take
1.5 MB; `memory` is what the longer n-grams may take besides. The arrays lie on the CPU, where trees are grown.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

import numpy as np

from .matrix_file import MatrixFileError, check_header, check_sizes, read_matrix_file, write_matrix
from .mixture import Sources, matching_cells, mixture_calibration
from .ngram_learning import Observations, foresees, overwrite, surprising
from .ngram_rows import FULL, Rows, find_row
from .ngrams import ABSENT
from .occurrences import OccurrenceArrays, Occurrences

MAX_ORDER = 4
_NO_TEXT = OccurrenceArrays.empty(0)


def check_options(k: int, orders: int, memory: float, past: int) -> None:
    """Raises ValueError unless some matrix can have these sizes; `NgramMatrix` says what they are."""
    if k < 1:
        raise ValueError(f"expected k of 1 candidate or more, got {k}")
    if not 1 <= orders <= MAX_ORDER:
        raise ValueError(f"expected orders from 1 to {MAX_ORDER}, got {orders}")
    if not 0 <= memory < math.inf:
        raise ValueError(f"expected memory of 0 MB or more, got {memory}")
    if past < 0:
        raise ValueError(f"expected past of 0 tokens or more, got {past}")


class NgramMatrix:
    """What was learned from verified drafts: candidates and probabilities after the last one to `orders` tokens."""

    def __init__(self, vocab_size: int, k: int = 8, orders: int = 3, memory: float = 16.0, past: int = 0) -> None:
        """`memory`: megabytes for the n-grams of two tokens and more; `past`: how many tokens of earlier texts are
        kept, 20 bytes each. Raises ValueError.
        """
        check_sizes(vocab_size, k)
        check_options(k, orders, memory, past)
        self.vocab_size, self.k, self.orders = vocab_size, k, orders
        hashed = int(memory * 1_000_000) // (8 + 6 * k) if orders > 1 else 0
        self.rows = Rows(
            candidates=np.zeros((vocab_size + hashed, k), np.int32),
            shares=np.zeros((vocab_size + hashed, k), np.uint16),
            keys=np.zeros(hashed, np.int64),
        )
        self.calibration = mixture_calibration()
        """How likely candidates of each kind are: `calibration`."""
        self.past = Occurrences(capacity=past)
        """The newest tokens of all texts: `occurrences.Recorder`."""

    @property
    def candidates(self) -> np.ndarray:
        """(vocab_size, k) int32: the adjacency matrix, best first."""
        return self.rows.candidates[: self.vocab_size]

    @property
    def shares(self) -> np.ndarray:
        """(vocab_size, k) uint16: their probabilities, 65,535 for 1."""
        return self.rows.shares[: self.vocab_size]

    @property
    def probabilities(self) -> np.ndarray:
        """(vocab_size, k) float32: of the candidates, when they were last seen."""
        return self.shares.astype(np.float32) / FULL

    @property
    def filled(self) -> np.ndarray:
        """(vocab_size,) bool: the tokens that something was learned for."""
        return self.shares[:, 0] > 0

    @property
    def ngrams(self) -> int:
        """Number of n-grams of two tokens and more that something is known for."""
        return int((self.rows.keys > 0).sum())

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (*self.rows, *self.past.arrays))

    def __repr__(self) -> str:
        return (
            f"NgramMatrix({self.vocab_size:,} tokens x {self.k}, {int(self.filled.sum()):,} rows filled, "
            f"{self.ngrams:,} of {len(self.rows.keys):,} longer contexts)"
        )

    def look_up(self, *ngram: int) -> list[tuple[int, float]]:
        """Candidates and probabilities after the last tokens of a text, the newest last; empty if never seen.

        Raises ValueError for more tokens than `orders`, or none.
        """
        if not 1 <= len(ngram) <= self.orders:
            raise ValueError(f"expected 1 to {self.orders} tokens, got {len(ngram)}")
        newest_first = np.array(ngram[::-1], np.int64)
        row = find_row(self.rows, newest_first, len(ngram))
        if row < 0:
            return []
        shares = self.rows.shares[row] / FULL
        return [(int(token), float(p)) for token, p in zip(self.rows.candidates[row], shares, strict=True)]

    def learn(
        self,
        ngrams: np.ndarray,
        candidates: np.ndarray,
        probabilities: np.ndarray,
        chosen: np.ndarray | None = None,
        remembers: float = 0.0,
        favours: float = 0.0,
    ) -> None:
        """Overwrites the rows of n n-grams, in order, so that of equal ones the last stays.

        `ngrams` is (n, orders) int64, the newest token first, -1 before the beginning of a text; `candidates` and
        `probabilities` (n, k), best first; `chosen` (n,) int64 the token that followed, -1 where it is not known. A row
        keeps a share of `remembers` of what it held, and a chosen token gains a share of `favours` of the others'.
        Raises ValueError for another number of rows or of candidates.
        """
        wanted = (len(ngrams), self.k)
        if candidates.shape != wanted or probabilities.shape != wanted:
            raise ValueError(
                f"expected candidates and probabilities of {wanted[0]} x {wanted[1]}, "
                f"got {candidates.shape} and {probabilities.shape}"
            )
        if chosen is None:
            chosen = np.full(len(ngrams), ABSENT, np.int64)
        # Another type or layout would be another compilation, and so would a share of a type of its own.
        seen = Observations(
            np.ascontiguousarray(ngrams, np.int64),
            np.ascontiguousarray(candidates, np.int32),
            np.ascontiguousarray(probabilities, np.float32),
            np.ascontiguousarray(chosen, np.int64),
        )
        overwrite(self.rows, seen, float(remembers) or None, float(favours) or None)

    def foresees(self, ngrams: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """(n,) bool: whether the row of each n-gram (n, orders) as a whole has the token `chosen` (n,) first; -1 where
        it is not known.
        """
        return foresees(self.rows, np.ascontiguousarray(ngrams, np.int64), np.ascontiguousarray(chosen, np.int64))

    def surprised_by(self, ngrams: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """(m,) int64: which of n n-grams (n, orders) have something to learn from float32 logits (n, vocabulary); not
        those whose row as a whole has the likeliest token first.
        """
        return surprising(self.rows, np.ascontiguousarray(ngrams, np.int64), np.ascontiguousarray(logits, np.float32))

    def sources(self) -> Sources:
        """What candidates come from, without a text of their own."""
        return Sources(self.rows, _NO_TEXT, self.past.arrays, self.calibration)

    def save(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Writes a safetensors file; as `AdjacencyMatrix.save`."""
        write_matrix(path, self._arrays(), tokenizer, orders=self.orders)

    def load(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """As `AdjacencyMatrix.load`; raises MatrixFileError for a file of other orders too. Of contexts and of the past
        as much is kept as there is room for here.
        """
        read, header = read_matrix_file(path)
        if "shares" not in read:
            raise MatrixFileError(
                f"{path}: expected a matrix with probabilities, got one of the drafter 'published'; "
                "load it there, or start a new one"
            )
        if "calibration" not in read:
            raise MatrixFileError(
                f"{path}: expected a matrix with contexts, got rows of single tokens alone; "
                "give a file written by --matrix"
            )
        ours = {"vocab_size": self.vocab_size, "k": self.k, "orders": self.orders, "tokenizer": tokenizer}
        check_header(path, ours, header)
        calibration = mixture_calibration()
        # Files of version 2 and before knew no past.
        counted = calibration if "past" in read else matching_cells(calibration)
        if read["calibration"].shape != counted.reshape(-1, 2).shape:
            raise MatrixFileError(
                f"{path}: expected a calibration of {len(counted)} kinds, got {len(read['calibration'])}; "
                "start a new one"
            )
        counted[...] = read["calibration"].reshape(counted.shape)
        self.calibration[:] = calibration
        self.candidates[:], self.shares[:] = read["candidates"], read["shares"]
        self.rows.keys[:] = 0
        if len(self.rows.keys):
            known = read["context_keys"] > 0  # in old files places that were free stand there too
            keys = read["context_keys"][known]
            places = keys % len(self.rows.keys)
            self.rows.keys[places] = keys
            self.rows.candidates[self.vocab_size + places] = read["context_candidates"][known]
            self.rows.shares[self.vocab_size + places] = read["context_shares"][known]
        self.past = Occurrences(read.get("past", ()), capacity=self.past.capacity)

    def _arrays(self) -> Mapping[str, np.ndarray]:
        """Everything that is learned, by its name in a file."""
        known = np.flatnonzero(self.rows.keys > 0)
        return {
            "candidates": self.candidates,
            "shares": self.shares,
            "context_candidates": self.rows.candidates[self.vocab_size + known],
            "context_shares": self.rows.shares[self.vocab_size + known],
            "context_keys": self.rows.keys[known],
            "calibration": self.calibration,
            "past": self.past.tokens,
        }
