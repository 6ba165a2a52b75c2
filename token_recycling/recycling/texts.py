"""The texts that are being written: each has a slot in shared arrays, an index of what it says, and a recorder, which
adds it to the past of all.

A slot is given back when its text is gone, in whatever thread and at whatever moment that is. What such a text had not
yet added to the past of all is put aside then, and added with the next draft.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import numpy as np

from .growth import TextArrays
from .occurrences import BREAK, LONGEST, Occurrences, masked

_PIECE, _LEAD = 32, 8
"""Tokens of a piece of a text, and how many of the piece before it stand before these again."""


class Recorder:
    """Adds one text to the past of all, a piece at a time: texts that are written at once do not mix. A piece begins
    with the end of the one before, unless that is the newest of the past. One that is there already is not added again.
    """

    def __init__(self, past: Occurrences, before: np.ndarray | None = None, piece: int = _PIECE) -> None:
        """`before` (n,): tokens before the text, matched and never drafted. `piece`: tokens that are added at once."""
        self._past, self._piece, self._written_to = past, piece, -1
        self._held: list[int] = [] if before is None else masked(before[-LONGEST:]).tolist()
        """The end of the last piece, or of `before`, and the tokens since."""
        self._lead = len(self._held)

    def add(self, tokens: Iterable[int], ends: bool = False) -> None:
        """Add what was written since the last call; `ends`: the text ends with it."""
        self._held.extend(tokens)
        if len(self._held) - self._lead < (1 if ends else self._piece):
            return
        with self._past.writing:
            if self._past.holds(self._held):
                self._written_to = -1  # the next piece does not follow what stands at the end
            else:
                alone = len(self._past) == self._written_to
                self._past.extend(self._held[self._lead :] if alone else [BREAK, *self._held])
                self._written_to = len(self._past)
        self._held = self._held[-_LEAD:]
        self._lead = len(self._held)


class Text:
    """One text that is being written, kept by whoever asks for its drafts."""

    slot: int
    read = recorded = 0
    """Tokens that were seen, and given to the recorder."""
    last = -1
    """The last token that was seen."""


class Texts:
    """The slots of all texts of a recycler."""

    def __init__(self, past: Occurrences, *sizes: int) -> None:
        """`past`: what was written before, of all texts. `sizes`: as of `TextArrays.empty`."""
        self._past, self._sizes = past, sizes
        self._free: list[int] = []
        self._predicted: list[int] = []
        """Tokens of each index that are not the text's."""
        self._indices: list[Occurrences] = []
        self._recorders: list[Recorder] = []
        self._ended: list[Recorder] = []
        self.arrays = TextArrays.empty(0, *sizes)
        """Made anew as there are more texts."""

    def new(self) -> Text:
        """A text in a slot of its own, as long as it is referred to."""
        text = Text()
        text.slot = self._take()
        weakref.finalize(text, self._give_back, text.slot)
        return text

    def begin(self, slot: int, prompt: int, recorder: Recorder) -> None:
        """A text of a prompt of so many tokens begins in a slot, or another one than before."""
        arrays = self.arrays
        arrays.copying.begin(slot, prompt)
        arrays.made[slot] = arrays.read[slot] = arrays.wrong[slot] = 0
        self._ended.append(self._recorders[slot])
        self._indices[slot], self._recorders[slot], self._predicted[slot] = Occurrences(), recorder, 0
        self._locate(slot)

    def predict(self, slot: int, tokens: Sequence[int]) -> None:
        """Adds tokens to the index of a text that has just begun."""
        self._indices[slot].extend(tokens)
        self._predicted[slot] = len(tokens)
        self._locate(slot)

    def reserve(self, slot: int, length: int) -> None:
        """Makes room for what is not read of a text of `length` tokens."""
        if self._predicted[slot] + length > self.arrays.capacities[slot]:
            self._indices[slot].reserve(length - int(self.arrays.read[slot]))
            self._locate(slot)

    def record(self, slot: int, written: Sequence[int], ends: bool) -> None:
        """Adds what was written to the past; `ends`: the text ends with it."""
        self._recorders[slot].add(written, ends)

    def record_ended(self) -> None:
        """Adds to the past what texts that are gone still hold."""
        while self._ended:
            self._ended.pop().add((), ends=True)

    def _take(self) -> int:
        """A free slot; where there is none, twice as many are made."""
        if not self._free:
            old, slots = self.arrays, len(self._indices)
            self.arrays = new = TextArrays.empty(max(1, 2 * slots), *self._sizes)
            for into, from_ in zip(_flat(new), _flat(old), strict=True):
                into[:slots] = from_[:slots]
            new.wrong[-1] = old.wrong[-1]
            added = range(slots, len(new.read))
            self._indices += [Occurrences() for _ in added]
            self._predicted += [0 for _ in added]
            self._recorders += [Recorder(self._past) for _ in added]
            self._free += reversed(added)
        return self._free.pop()

    def _give_back(self, slot: int) -> None:
        """Nothing here may wait."""
        self._indices[slot] = Occurrences()
        self._ended.append(self._recorders[slot])
        self._free.append(slot)

    def _locate(self, slot: int) -> None:
        index = self._indices[slot].arrays
        self.arrays.capacities[slot] = len(index.tokens)
        self.arrays.addresses[slot] = [array.__array_interface__["data"][0] for array in index]


def _flat(texts: TextArrays) -> list[np.ndarray]:
    """All arrays of texts that have a dimension of slots in front."""
    return [*texts.trees[:-1], *texts[1:-1], *texts.copying]
