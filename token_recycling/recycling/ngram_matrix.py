"""Candidates after n-grams: the adjacency matrix with probabilities, and rows for longer n-grams.

Beyond the matrix of Token Recycling (section 3.1) every row holds the candidates' probabilities too, and more rows are
kept for the last two, three or four tokens, in a table of fixed size: a row's place is a hash of its tokens, and a
newer n-gram takes the place of an older one. Probabilities have 16 bits, so that 32,000 tokens with 8 candidates take
1.5 MB; `memory` is what the longer n-grams may take besides. The arrays lie on the CPU, where trees are grown. Learning
an n-gram costs a fraction of a microsecond for each order, in compiled code.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part
from .._util.topk import exceeded
from .alignment import Copying
from .matrix_file import check_sizes, read_ngram_matrix, write_matrix
from .mixture import Sources, mixture_calibration
from .ngrams import ABSENT, FULL, Rows, find_row, key_of
from .occurrences import OccurrenceArrays, Occurrences

MAX_ORDER = 4
_NO_TEXT, _NOT_COPIED = OccurrenceArrays.empty(0), Copying.empty()


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
        """`memory`: megabytes for longer n-grams; `past`: tokens of earlier texts, 20 bytes each. Raises ValueError."""
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
        self.past = Occurrences(capacity=past)
        """The newest tokens of all texts."""

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
        """Candidates and probabilities after a text's last tokens, newest last. Raises ValueError beyond `orders`."""
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
        given, types = (ngrams, candidates, probabilities, chosen), (np.int64, np.int32, np.float32, np.int64)
        seen = Observations(*map(np.ascontiguousarray, given, types))
        overwrite(self.rows, seen, float(remembers) or None, float(favours) or None)

    def foresees(self, ngrams: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """(n,) bool: whether the row of each n-gram (n, orders) as a whole has `chosen` (n,) first, -1 if unknown."""
        return foresees(self.rows, np.ascontiguousarray(ngrams, np.int64), np.ascontiguousarray(chosen, np.int64))

    def surprised_by(self, ngrams: np.ndarray, logits: np.ndarray) -> np.ndarray:
        """(m,) int64: the n-grams (n, orders) whose rows do not have the likeliest token by logits (n, vocabulary)
        first.
        """
        return surprising(self.rows, np.ascontiguousarray(ngrams, np.int64), np.ascontiguousarray(logits, np.float32))

    def sources(self) -> Sources:
        """What candidates come from, without a text."""
        return Sources(self.rows, _NO_TEXT, self.past.arrays, self.calibration, _NOT_COPIED)

    def save(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """Writes a safetensors file; as `AdjacencyMatrix.save`."""
        known = np.flatnonzero(self.rows.keys > 0)
        held = {
            "candidates": self.candidates,
            "shares": self.shares,
            "context_candidates": self.rows.candidates[self.vocab_size + known],
            "context_shares": self.rows.shares[self.vocab_size + known],
            "context_keys": self.rows.keys[known],
            "calibration": self.calibration,
            "past": self.past.tokens,
        }
        write_matrix(path, held, tokenizer, orders=self.orders)

    def load(self, path: str | os.PathLike[str], tokenizer: str = "") -> None:
        """As `AdjacencyMatrix.load`, and of the same orders; keeps what contexts and past tokens there is room for."""
        ours = {"vocab_size": self.vocab_size, "k": self.k, "orders": self.orders, "tokenizer": tokenizer}
        read = read_ngram_matrix(path, ours, self.calibration)
        self.calibration[:] = read["calibration"]
        self.candidates[:], self.shares[:] = read["candidates"], read["shares"]
        self.rows.keys[:] = 0
        if len(self.rows.keys):
            keys = read["context_keys"]
            places = keys % len(self.rows.keys)
            self.rows.keys[places] = keys
            self.rows.candidates[self.vocab_size + places] = read["context_candidates"]
            self.rows.shares[self.vocab_size + places] = read["context_shares"]
        self.past = Occurrences(read["past"], capacity=self.past.capacity)


class Observations(NamedTuple):
    """What the target said after each of n n-grams; see `NgramMatrix.learn`."""

    ngrams: np.ndarray
    candidates: np.ndarray
    probabilities: np.ndarray
    chosen: np.ndarray


@compiled
def overwrite(rows: Rows, seen: Observations, remembers: float | None, favours: float | None) -> None:
    """See `NgramMatrix.learn`. A share of None compiles nothing for it."""
    vocab_size = len(rows.candidates) - len(rows.keys)
    ngrams, candidates, probabilities, chosen = seen
    n, k = candidates.shape
    ids, shares = np.empty(k, np.int32), np.empty(k, np.float32)
    merged_ids, merged = np.empty(2 * k, np.int32), np.empty(2 * k, np.float32)
    for node in range(n):
        if ngrams[node, 0] >= vocab_size:  # has an embedding, but is never emitted: it has no row
            continue
        for place in range(k):
            ids[place], shares[place] = candidates[node, place], probabilities[node, place]
        if favours is not None:  # noqa: SIM102 - numba leaves out what hangs on a None alone
            if chosen[node] >= 0:
                _favour(ids, shares, chosen[node], favours)
        for order in range(1, ngrams.shape[1] + 1):
            if ngrams[node, order - 1] < 0 or (order > 1 and len(rows.keys) == 0):
                break
            row = find_row(rows, ngrams[node], order)
            known = row >= 0
            if order == 1:
                row = ngrams[node, 0]
            elif not known:
                key = key_of(ngrams[node], order)
                row = vocab_size + key % len(rows.keys)
                rows.keys[row - vocab_size] = key
            wanted_ids, wanted = ids, shares
            if remembers is not None:  # noqa: SIM102
                if known:
                    _merge(rows, row, ids, shares, remembers, merged_ids, merged)
                    wanted_ids, wanted = merged_ids, merged
            for place in range(k):
                rows.candidates[row, place] = wanted_ids[place]
                rows.shares[row, place] = np.uint16(min(wanted[place], np.float32(1.0)) * FULL + np.float32(0.5))
            if not rows.shares[row, 0]:
                rows.shares[row, 0] = 1


@compiled_part
def _favour(ids: np.ndarray, shares: np.ndarray, chosen: int, favours: float) -> None:
    """Moves a share of `favours` from all candidates to the emitted one, and puts it in order."""
    k = len(ids)
    place = k - 1
    for rank in range(k):
        shares[rank] *= 1 - favours
        if ids[rank] == chosen:
            place = rank
    value = favours + (shares[place] if ids[place] == chosen else np.float32(0.0))
    while place > 0 and shares[place - 1] < value:
        ids[place], shares[place] = ids[place - 1], shares[place - 1]
        place -= 1
    ids[place], shares[place] = chosen, value


@compiled_part
def _merge(
    rows: Rows, row: int, ids: np.ndarray, shares: np.ndarray, remembers: float, into: np.ndarray, sums: np.ndarray
) -> None:
    """The mean of an old row and a new one, the old weighted by `remembers`, the likeliest first."""
    k = len(ids)
    for place in range(k):
        into[place], sums[place] = ids[place], (1 - remembers) * shares[place]
    count = k
    for place in range(k):
        token, share = rows.candidates[row, place], remembers * rows.shares[row, place] / FULL
        for other in range(k):
            if into[other] == token:
                sums[other] += share
                break
        else:
            into[count], sums[count] = token, share
            count += 1
    _sort_descending(into, sums, count)


@compiled_part
def _sort_descending(ids: np.ndarray, shares: np.ndarray, count: int) -> None:
    """Sorts the first `count` candidates, the likeliest first; equal ones stay in order."""
    for place in range(1, count):
        token, share, at = ids[place], shares[place], place
        while at > 0 and shares[at - 1] < share:
            ids[at], shares[at] = ids[at - 1], shares[at - 1]
            at -= 1
        ids[at], shares[at] = token, share


@compiled
def foresees(rows: Rows, ngrams: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """See `NgramMatrix.foresees`."""
    found = np.zeros(len(ngrams), np.bool_)
    for node in range(len(ngrams)):
        row = find_row(rows, ngrams[node], ngrams.shape[1]) if chosen[node] >= 0 else np.int64(-1)
        found[node] = row >= 0 and rows.candidates[row, 0] == chosen[node]
    return found


@compiled
def surprising(rows: Rows, ngrams: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """See `NgramMatrix.surprised_by`."""
    found, count = np.empty(len(ngrams), np.int64), 0
    for node in range(len(ngrams)):
        row = find_row(rows, ngrams[node], ngrams.shape[1])
        if row < 0 or exceeded(logits, node, logits[node, rows.candidates[row, 0]]):
            found[count] = node
            count += 1
    return found[:count]
