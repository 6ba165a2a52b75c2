"""Criteria that must see all texts of a batch at once, as `generate` shows them.

`generate` lets all texts grow by one token, asks, and goes on. Here texts accept different numbers of tokens and one is
ahead of another. So a column of the batch is judged when every text has reached it, in order and once, with the same
tokens as in `generate`; what a text has said beyond the column at which it ended is withdrawn. A criterion may thus
compare texts, count its calls or answer for all at once. The cost is what is withdrawn: no forward pass more, since the
slowest text sets their number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import StoppingCriteriaList

from .text import Text


class Jury:
    """Asks criteria about the texts of a batch, column by column, and ends texts."""

    def __init__(self, texts: Sequence[Text], criteria: StoppingCriteriaList, padding: int | None) -> None:
        """`padding` fills up texts that have ended; None if, as without an end-of-sequence token, every text goes on
        until all have ended.
        """
        self.texts, self.criteria, self.padding = texts, criteria, padding
        self.withdrawn = 0
        """Tokens that were emitted beyond an end."""
        self._columns = texts[0].columns
        self._met = [False] * len(texts)

    def judge(self) -> None:
        """Asks about every column that all texts have reached."""
        while not all(self._met) and all(text.ended or text.columns > self._columns for text in self.texts):
            self._columns += 1
            stops = self.criteria(self._shown(), None).tolist()
            for row, text in enumerate(self.texts):
                at_its_end = text.ended and text.columns <= self._columns
                if self._met[row] or not (stops[row] or at_its_end):
                    continue
                self._met[row] = True
                if self.padding is not None:
                    self._end(text)
        if self.padding is None and all(self._met):
            for text in self.texts:
                self._end(text)

    def _end(self, text: Text) -> None:
        self.withdrawn += max(0, text.columns - self._columns)
        text.end_at(min(text.columns, self._columns))

    def _shown(self) -> torch.Tensor:
        """(batch, columns) ids up to the column that is judged, as `generate` would have them there."""
        shown = self.texts[0].padded.new_full((len(self.texts), self._columns), self.padding or 0)
        for row, text in enumerate(self.texts):
            own = text.padded[0, : self._columns]
            shown[row, : len(own)] = own
        return shown
