"""The texts that are being written: each has a slot in shared arrays, an index of what it says, and a recorder.

A slot is given back when its text is gone, in whatever thread and at whatever moment that is. What such a text had not
yet added to the past of all is put aside then, and added with the next draft.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from .growth import TextArrays
from .occurrences import Occurrences
from .recorder import Recorder


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
        self._indices[slot], self._recorders[slot] = Occurrences(), recorder
        self._locate(slot)

    def extend(self, slot: int, tokens: Sequence[int]) -> None:
        """Adds tokens to the index of a text."""
        self._indices[slot].extend(tokens)
        self._locate(slot)

    def reserve(self, slot: int, length: int) -> None:
        """Makes room for what is not read of a text of `length` tokens."""
        index, new = self._indices[slot], length - int(self.arrays.read[slot])
        if len(index) + new > self.arrays.capacities[slot]:
            index.reserve(new)
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
