"""What the default is to reach, and whether it does."""

from __future__ import annotations

from typing import NamedTuple

from token_recycling.bench.report.table import Cell

from .figures import Ratio


class Bar(NamedTuple):
    """A bound of a ratio, from below or, of times, from above."""

    bound: float
    most: bool = False

    def __str__(self) -> str:
        return f"{'at most' if self.most else 'at least'} {self.bound:g}"

    def met(self, found: Ratio) -> bool:
        return found.value <= self.bound if self.most else found.value >= self.bound

    def judged(self, found: Ratio) -> Cell:
        """Yes or no, and whether the noise could have made it the other."""
        unsure = ", in noise" if found.low <= self.bound <= found.high else ""
        met = self.met(found)
        return Cell(f"{'yes' if met else 'no'}{unsure}", alarm=not met)


OF_PLAIN, OF_BEST_PART = Bar(0.98), Bar(0.97)
"""Speed of the default, on every kind of text."""
OF_GENERATE = {"float32": Bar(1.6), "bfloat16": Bar(2.1)}
"""Speed of the default on written text, by type."""
OF_LOOKUP = Bar(1.3)
"""The same against prompt lookup of transformers."""
OF_PUBLISHED = Bar(1.0)
"""Mean accepted tokens in replay, with 16 nodes and with the published method's 80."""
FIRST_TOKEN = Bar(1.03, most=True)
"""Time to the first token, by that of `generate`."""
