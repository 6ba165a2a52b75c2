"""Suffix index: finds earlier occurrences of the last tokens, in one sequence or many, by hash chains.

As in LZ77 compressors, each place points to the previous place with the same hash of its last tokens, in two chains: of
one token and of three. A look-up walks the newest few places of both and compares backwards, so it finds the longest
matches and how often each continuation followed. SuffixDecoding (2411.04975) uses a suffix tree for the same. Tokens
that are matched but never drafted are `masked`.

An index grows to its capacity and then keeps the newest tokens: 20 bytes each, up to 80 while it grows. Cost, in
compiled code: nanoseconds per added token; a microsecond per look-up in a sequence, four among a million tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from .._util.compiled import compiled, compiled_part
from .._util.locks import Lock
from .ngrams import ABSENT

LONGEST = 32
"""Maximum tokens of a match that are compared."""
FOUND = 32
"""Maximum places that a look-up for a growing draft finds: 16 per chain."""
BREAK = -1
"""Separates two sequences: no match crosses it."""
_MASK = BREAK - 1
"""A masked token is this minus the token."""
_LONG = 3
"""Tokens hashed for the longer chain; the shorter one hashes 1."""
_LEAST = 1024
"""Minimum number of tokens that memory is reserved for: 20 KB, so that few short sequences are indexed again."""
_RENUMBERED = 2**31 - 2
"""Places have 32 bits: after this many tokens they are renumbered."""
_PIECE = 32
"""Tokens per recorded piece of a sequence. The last `LONGEST` are repeated at the start of the next piece, so that a
match there is of the longest kind.
"""


MATCH = np.dtype([("place", np.int64), ("length", np.int64)], align=True)
"""The place after an earlier occurrence of the last tokens, and the number of matching tokens."""


class IndexArrays(NamedTuple):
    """The arrays of an index, for compiled functions."""

    tokens: np.ndarray  # (capacity,) int32: token number n is at `_slot(n, capacity)`
    before: np.ndarray
    """(2, capacity) int32: for each token the previous one in its chains of one and of three tokens, -1 for none."""
    newest: np.ndarray
    """(2, chains) int32: the newest token of every chain, by the hash of its last tokens; a power of two, or 0."""
    added: np.ndarray  # (1,) int64: number of tokens added so far

    @classmethod
    def empty(cls, capacity: int, chains: int | None = None) -> IndexArrays:
        """Allocate `capacity` tokens, and `chains` of each length, a power of two; by default as many as tokens."""
        before = np.full((2, capacity), -1, np.int32)
        newest = np.full((2, capacity if chains is None else chains), -1, np.int32)
        return cls(np.full(capacity, BREAK, np.int32), before, newest, np.zeros(1, np.int64))


def masked(tokens: np.ndarray) -> np.ndarray:
    """Return tokens (n,) in the form that matches but is never drafted: each becomes a number below `BREAK`."""
    return _MASK - tokens.astype(np.int64)


@compiled_part
def _bucket(first: int, second: int, third: int, buckets: int) -> int:
    """Return the bucket of the chain of these tokens; missing ones are `BREAK`."""
    mixed = np.uint64(first + 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ np.uint64(second + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(29)) ^ np.uint64(third + 1)) * np.uint64(0x94D049BB133111EB)
    return np.int64((mixed ^ (mixed >> np.uint64(32))) & np.uint64(buckets - 1))


@compiled_part
def _slot(place: int, capacity: int) -> int:
    """Return the slot of token number `place`. Only an index whose capacity is a power of two wraps around; a division
    would take a third of a look-up.
    """
    return place if place < capacity else place & (capacity - 1)


@compiled_part
def _unmasked(token: int) -> int:
    return token if token >= BREAK else _MASK - token


@compiled(allocates=False)
def append(index: IndexArrays, added: np.ndarray) -> None:
    """Append tokens (n,) int64; a full index drops the oldest."""
    for new in range(len(added)):
        append_one(index, np.int64(added[new]))


@compiled_part
def append_one(index: IndexArrays, token: int) -> None:
    """Append a token; a full index drops the oldest."""
    capacity, chains, count = len(index.tokens), index.newest.shape[1], index.added[0]
    place = _slot(count, capacity)
    index.tokens[place] = token
    index.before[0, place] = index.before[1, place] = -1
    index.added[0] = count + 1
    token = _unmasked(token)
    if token < 0:
        return
    bucket = _bucket(token, BREAK, BREAK, chains)
    index.before[0, place] = index.newest[0, bucket]
    index.newest[0, bucket] = count
    if count >= _LONG - 1:
        second = _unmasked(np.int64(index.tokens[_slot(count - 1, capacity)]))
        third = _unmasked(np.int64(index.tokens[_slot(count - 2, capacity)]))
        if second >= 0 and third >= 0:
            bucket = _bucket(token, second, third, chains)
            index.before[1, place] = index.newest[1, bucket]
            index.newest[1, bucket] = count


@compiled_part
def token_at(index: IndexArrays, place: int) -> int:
    """Return token number `place`; -1 or less where nothing is drafted: at the end, between sequences, if masked."""
    if place >= index.added[0]:
        return np.int64(BREAK)
    return np.int64(index.tokens[_slot(place, len(index.tokens))])


@compiled(allocates=False)
def find_matches(index: IndexArrays, recent: np.ndarray, matches: np.ndarray) -> int:
    """Fill `matches` (m,) of `MATCH` with earlier occurrences of the tokens `recent` (n,), newest first; matches of the
    three-token chain first, newest first. Return their number.
    """
    capacity, chains, count, number = len(index.tokens), index.newest.shape[1], index.added[0], np.int64(0)
    if not capacity or recent[0] < 0:
        return number
    oldest = max(np.int64(0), count - capacity)
    for chain in range(1, -1, -1):
        least = _LONG if chain else 1
        if recent[least - 1] < 0:
            continue
        bucket = _bucket(recent[0], recent[1], recent[2], chains) if chain else _bucket(recent[0], BREAK, BREAK, chains)
        place = np.int64(index.newest[chain, bucket])
        for _ in range(len(matches) // 2):
            if place < oldest:
                break
            length = np.int64(0)
            while (
                length < len(recent)
                and place - length >= oldest
                and recent[length] >= 0
                and _same(index.tokens[_slot(place - length, capacity)], recent[length])
            ):
                length += 1
            if length >= least and (chain or length < _LONG) and token_at(index, place + 1) >= 0:
                matches[number].place, matches[number].length = place + 1, length
                number += 1
            place = np.int64(index.before[chain, _slot(place, capacity)])
    return number


@compiled_part
def _same(stored: int, token: int) -> bool:
    return stored == token or stored == _MASK - token


def longest_match(index: IndexArrays, recent: np.ndarray, walked: int) -> tuple[np.ndarray, int]:
    """Return the places (n,) int64 after the longest match of the last tokens `recent` (m,), newest last, and its
    length, 0 for none; the newest `walked` places of each chain are compared.
    """
    newest_first, matches = np.full(max(len(recent), _LONG), ABSENT, np.int64), np.empty(2 * walked, MATCH)
    newest_first[: len(recent)] = recent[::-1]
    matches = matches[: find_matches(index, newest_first, matches)]
    lengths = np.minimum(matches["length"], len(recent))
    length = int(lengths.max(initial=0))
    return matches["place"][lengths == length], length


@cache
def warm_up() -> None:
    """Compile the functions of a look-up."""
    longest_match(SuffixIndex([0, 0]).arrays, np.zeros(1, np.int64), 1)


class SuffixIndex:
    """The newest tokens of one or many sequences, and their earlier occurrences."""

    def __init__(self, tokens: Iterable[int] = (), capacity: int | None = None) -> None:
        """`capacity`: maximum tokens kept, rounded up to a power of two; unlimited if None."""
        self.capacity = None if capacity is None else _power_of_two(capacity)
        self.writing = Lock()
        """Held by a thread that writes to a shared index."""
        self.arrays = IndexArrays.empty(0)
        self.extend(tokens)

    def __len__(self) -> int:
        """Return the number of tokens added so far."""
        return int(self.arrays.added[0])

    @property
    def tokens(self) -> np.ndarray:
        """(n,) int32: the newest tokens, in order."""
        count, capacity = len(self), len(self.arrays.tokens)
        if count <= capacity:
            return self.arrays.tokens[:count]
        return np.roll(self.arrays.tokens, -(count % capacity))

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens of one sequence in order; a `BREAK` ends a sequence."""
        added = np.ascontiguousarray(tokens if isinstance(tokens, np.ndarray) else list(tokens), np.int64)
        self.reserve(len(added))
        if len(added) and len(self.arrays.tokens):
            append(self.arrays, added)

    def reserve(self, more: int) -> None:
        """Reserve memory for `more` tokens, up to the capacity; the arrays may be replaced."""
        total, capacity = len(self) + more, len(self.arrays.tokens)
        if total <= capacity and total <= _RENUMBERED:
            return
        larger = max(_LEAST, _power_of_two(2 * total))
        larger = larger if self.capacity is None else min(larger, self.capacity)
        grows = total > capacity < larger
        if grows or total > _RENUMBERED:
            tokens = self.tokens.astype(np.int64)
            self.arrays = IndexArrays.empty(larger if grows else capacity)
            append(self.arrays, tokens)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Return whether the index contains the newest token after the same `LONGEST` preceding tokens; False for fewer
        tokens.
        """
        if len(tokens) < LONGEST:
            return False
        before = np.array(tokens[-LONGEST - 1 : -1], np.int64)
        places, length = longest_match(self.arrays, before, FOUND // 2)
        return length == len(before) and any(token_at(self.arrays, place) == tokens[-1] for place in places)


class Recorder:
    """Appends one sequence to the shared history piece by piece, so that concurrent sequences do not interleave. A
    piece repeats the end of the previous one unless that is the newest in the history. Continuations already in the
    history are not added again.
    """

    def __init__(self, history: SuffixIndex, before: np.ndarray | None = None) -> None:
        """`before` (n,): tokens before the sequence, matched but never drafted."""
        self._history, self._written_to = history, -1
        self._tokens: list[int] = [] if before is None else masked(before[-LONGEST:]).tolist()
        """The end of the last piece, or of `before`, and the tokens since."""
        self._lead = len(self._tokens)

    def add(self, tokens: Iterable[int], ends: bool = False) -> None:
        """Add tokens; `ends`: the sequence ends with them."""
        self._tokens.extend(tokens)
        if len(self._tokens) - self._lead < (1 if ends else _PIECE):
            return
        with self._history.writing:
            if self._history.holds(self._tokens):
                self._written_to = -1  # the next piece does not continue the end of the history
            else:
                alone = len(self._history) == self._written_to
                self._history.extend(self._tokens[self._lead :] if alone else [BREAK, *self._tokens])
                self._written_to = len(self._history)
        self._tokens = self._tokens[-LONGEST:]
        self._lead = len(self._tokens)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 0 else 0
