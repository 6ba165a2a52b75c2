"""Chains for all texts of a step, grown best first under one budget, in one call of compiled code.

An engine verifies the drafts of many requests in one pass, where every token competes with those of all others. So the
chains grow together: each time the one whose next token is likeliest to be accepted becomes a token longer, until more
tokens would not pay (`costs.budget`); where a chain of a text alone is `best_first.fill` of a chain.

What the calibration says of a candidate holds for all texts. One text may be easier, as where it follows an earlier one
word for word, so that the chances along its chain are corrected by how many of its drafted tokens were wrong, against
how many were to be; what is not known of it yet is what all texts had of late.

Texts have slots. What compiled code needs of a slot are rows of shared arrays, and of its index, which grows with the
text, the addresses. Cost: five to eight microseconds a drafted token, nearly all of it the mixture's; next to nothing
where a long match is copied.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from .._util.compiled import compiled, compiled_part
from ..costs.budget import Payoff, may_pay
from .best_first import GrowingTree, count_chosen, plant
from .copying import begin, extend
from .mixture import Sources
from .ngram_rows import Rows
from .ngrams import ABSENT
from .occurrences import LONGEST, OccurrenceArrays, Occurrences, append

SLACK = 0.05
"""By how much tokens per time may fall short of the most, if every pass brings more tokens: a request is answered in
fewer passes.
"""
_PRIOR, _OF_TEXT, _OF_ALL = 2.0, 0.9, 0.99
"""Expected wrong tokens that what all texts had counts for; what older steps keep with every new one, of a text and of
all.
"""


class ForestArrays(NamedTuple):
    """For compiled functions; s slots."""

    growing: GrowingTree
    """Arrays with a dimension more, (s, ...), but the mixture."""
    made: np.ndarray
    """(s,) int64: nodes that the chain of a slot has, the root included, verified or not."""
    read: np.ndarray
    """(s,) int64: tokens of the text that were read."""
    copied: np.ndarray
    """(s, 2) int64: see `copying.begin`."""
    wrong: np.ndarray
    """(s + 1, 2) float64: drafted tokens that were wrong of late, and that were to be; the last row of all texts."""
    addresses: np.ndarray
    """(s, 4) int64: where the arrays of a slot's index lie."""
    capacities: np.ndarray
    """(s,) int64: of the index; 0 where texts are not searched."""


class Asked(NamedTuple):
    """The texts of a step, in any order; n of them."""

    tokens: np.ndarray
    """(rows, longest) int32: texts in rows."""
    rows: np.ndarray
    """(n,) int64: which row is a text's, ..."""
    slots: np.ndarray
    """... (n,) int64: its slot, ..."""
    lengths: np.ndarray
    """... (n,) int64: how many tokens it has, ..."""
    rooms: np.ndarray
    """... (n,) int64: and how many may be drafted."""
    learns: bool
    """Whether what was drafted right or wrong is counted for the calibration of all texts."""


def _pointers(dtype: Any) -> Any:
    """A function, for compiled ones, that makes a pointer to numbers of that type of their address."""

    @intrinsic
    def pointer(typing: Any, address: Any) -> Any:
        def cast(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(dtype)(address), cast

    return pointer


_int32s, _int64s = _pointers(types.int32), _pointers(types.int64)


@compiled_part(allocates=True)
def _index(forest: ForestArrays, slot: int) -> OccurrenceArrays:
    capacity, addresses = forest.capacities[slot], forest.addresses
    return OccurrenceArrays(
        carray(_int32s(addresses[slot, 0]), (capacity,)),
        carray(_int32s(addresses[slot, 1]), (2, capacity)),
        carray(_int32s(addresses[slot, 2]), (2, capacity)),
        carray(_int64s(addresses[slot, 3]), (1,)),
    )


@compiled_part(allocates=True)
def _chain(growing: GrowingTree, slot: int) -> GrowingTree:
    return GrowingTree(
        growing.tokens[slot],
        growing.parents[slot],
        growing.depths[slot],
        growing.ranks[slot],
        growing.values[slot],
        growing.recent[slot],
        growing.candidates[slot],
        growing.chances[slot],
        growing.cells[slot],
        growing.known[slot],
        growing.drafted[slot],
        growing.mixture,
    )


@compiled
def draft(
    forest: ForestArrays,
    asked: Asked,
    rows: Rows,
    past: OccurrenceArrays,
    calibration: np.ndarray,
    costs: np.ndarray,
    counts: np.ndarray,
) -> None:
    """Reads what is new of all texts, grows their chains, and fills in how many tokens of each pay, `counts` (n,).

    The tokens are those of `forest.growing` from 1. `costs` (m,) float64 are what passes over 1, 2, ... tokens of all
    texts together take, in any unit; none where every token pays. There are no more of them than the costs reach.
    """
    n = len(asked.rows)
    gains, correction = np.zeros(n), np.empty(n)
    most = 0
    for one in range(n):
        slot = asked.slots[one]
        text, chain = _index(forest, slot), _chain(forest.growing, slot)
        _read(forest, asked, one, text, chain, calibration)
        correction[one] = _correction(forest.wrong, slot)
        counts[one] = 0
        if asked.rooms[one] > 0:
            sources = Sources(rows, text, past, calibration)
            plant(chain, chain.recent, sources)
            begin(chain, np.int64(0), forest.copied[slot], sources)
            forest.made[slot] = 1
            gains[one] = _gain(chain, np.int64(0), correction[one])
            most += min(asked.rooms[one], np.int64(len(chain.tokens) - 1))
    if len(costs):
        most = min(most, np.int64(len(costs)) - n)
    grown, rates = np.empty(max(most, 0), np.int64), np.empty(max(most, 0))
    expected, best, total = float(n), float(n) / costs[n - 1] if most > 0 and len(costs) else 0.0, np.int64(0)
    while total < most:
        one = np.int64(0)
        for other in range(1, n):
            if gains[other] > gains[one]:
                one = np.int64(other)
        gain, slot = gains[one], asked.slots[one]
        if gain <= 0 or not may_pay(costs, Payoff(expected, best * (1 - SLACK), total), n + total, gain):
            break
        chain, last = _chain(forest.growing, slot), forest.made[slot]
        extend(chain, last, forest.copied[slot], Sources(rows, _index(forest, slot), past, calibration))
        chain.values[last] = gain
        forest.made[slot] = last + 1
        gains[one] = _gain(chain, last, correction[one]) if last < asked.rooms[one] else 0.0
        expected += gain
        rates[total] = expected / costs[n + total] if len(costs) else 1.0
        best = max(best, rates[total])
        grown[total] = one
        total += 1
    while total > 0 and rates[total - 1] < best * (1 - SLACK):
        total -= 1
    for place in range(total):
        counts[grown[place]] += 1


@compiled_part(allocates=True)
def _read(
    forest: ForestArrays,
    asked: Asked,
    one: int,
    text: OccurrenceArrays,
    chain: GrowingTree,
    calibration: np.ndarray,
) -> None:
    """Reads what is new of a text: counts what of its chain was right, adds it to its index, and keeps its end."""
    slot, row, length = asked.slots[one], asked.rows[one], asked.lengths[one]
    written = np.empty(length - forest.read[slot], np.int64)
    for place in range(len(written)):
        written[place] = asked.tokens[row, forest.read[slot] + place]
    if forest.made[slot]:
        if asked.learns:
            count_chosen(chain, forest.made[slot], written, calibration)
        _count_wrong(forest, slot, chain, written)
    if len(text.tokens):
        append(text, written)
    for place in range(LONGEST):
        chain.recent[place] = np.int64(asked.tokens[row, length - 1 - place]) if place < length else np.int64(ABSENT)
    forest.read[slot], forest.made[slot] = length, 0


@compiled_part
def _count_wrong(forest: ForestArrays, slot: int, chain: GrowingTree, written: np.ndarray) -> None:
    """Counts, for its text and for all, whether a token of the chain was wrong, and by how many that was to be."""
    wrong, foreseen = 0.0, 0.0
    for place in range(min(len(written), forest.made[slot] - 1)):
        foreseen += 1 - chain.chances[place, 0]
        if chain.tokens[place + 1] != written[place]:
            wrong = 1.0
            break
    of_all = len(forest.wrong) - 1
    for row, keeps in ((slot, _OF_TEXT), (of_all, _OF_ALL)):
        forest.wrong[row, 0] = forest.wrong[row, 0] * keeps + wrong
        forest.wrong[row, 1] = forest.wrong[row, 1] * keeps + foreseen


@compiled_part
def _correction(wrong: np.ndarray, slot: int) -> float:
    """How many of a text's drafted tokens are wrong, against how many are to be."""
    of_all = (wrong[len(wrong) - 1, 0] + 1) / (wrong[len(wrong) - 1, 1] + 1)
    return (wrong[slot, 0] + _PRIOR * of_all) / (wrong[slot, 1] + _PRIOR)


@compiled_part
def _gain(chain: GrowingTree, last: int, correction: float) -> float:
    """The probability that one more token is accepted after the last node of a chain, and all before it."""
    if not chain.known[last]:
        return 0.0
    return chain.values[last] * max(0.0, 1 - (1 - chain.chances[last, 0]) * correction)


class Forest:
    """Slots for the texts that are being written, as many as there are."""

    def __init__(self, nodes: int, orders: int, k: int, searches: bool = True) -> None:
        """`nodes`: most drafted tokens of a text; `orders` and `k`: those of the matrix; `searches`: whether what
        followed in a text before is drafted.
        """
        self._shape, self._searches = (nodes + 1, orders, k), searches
        self._free: list[int] = []
        self._indices: list[Occurrences] = []
        self.arrays = self._empty(0)

    def _empty(self, slots: int) -> ForestArrays:
        *one, mixture = GrowingTree.empty(*self._shape)
        growing = GrowingTree._make([*(np.zeros((slots, *array.shape), array.dtype) for array in one), mixture])
        made, read, capacities = np.zeros((3, slots), np.int64)
        copied, addresses = np.zeros((slots, 2), np.int64), np.zeros((slots, 4), np.int64)
        wrong = np.zeros((slots + 1, 2))
        return ForestArrays(growing, made, read, copied, wrong, addresses, capacities)

    def take(self) -> int:
        """A slot for a new text, which is to be cleared first."""
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """The text of a slot is at its end."""
        self._indices[slot] = Occurrences()
        self._free.append(slot)

    def clear(self, slot: int) -> None:
        """Forgets the text of a slot."""
        arrays = self.arrays
        arrays.made[slot] = arrays.read[slot] = arrays.wrong[slot] = 0
        self._indices[slot] = Occurrences()
        self._locate(slot)

    def reserve(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Makes room for texts (n,) of `lengths` (n,) tokens in `slots` (n,)."""
        if self._searches:
            for place in np.flatnonzero(lengths > self.arrays.capacities[slots]):
                slot = int(slots[place])
                self._indices[slot].reserve(int(lengths[place] - self.arrays.read[slot]))
                self._locate(slot)

    def _locate(self, slot: int) -> None:
        index = self._indices[slot].arrays
        self.arrays.capacities[slot] = len(index.tokens)
        self.arrays.addresses[slot] = [array.__array_interface__["data"][0] for array in index]

    def _grow(self) -> None:
        """Twice as many slots."""
        old, slots = self.arrays, len(self._indices)
        self.arrays = new = self._empty(max(1, 2 * slots))
        for into, from_ in zip((*new.growing[:-1], *new[1:]), (*old.growing[:-1], *old[1:]), strict=True):
            into[:slots] = from_[:slots]
        new.wrong[-1] = old.wrong[-1]
        added = range(slots, len(new.read))
        self._indices += [Occurrences() for _ in added]
        self._free += reversed(added)
