"""Whether a drafter is worth its time after others have drafted: learned from what it added and how long that took.

One more drafter is worth its time where it adds tokens at a higher rate than decoding has on average (the marginal
value theorem). What it adds depends most on how much is expected already: where the others are sure, little is left. So
it is learned for each number of tokens expected without it. Cost: a few additions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_EXPECTED = np.array([1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0])
_TRIALS, _AGAIN = 4, 16
"""A drafter is tried 4 times for each number of expected tokens; where it did not pay, every 16th time again."""
_MEMORY = 0.98
"""Share that older observations keep with every new one."""


class Forecast(NamedTuple):
    """What a step is expected to give, and what it takes."""

    tokens: float
    time: float
    """In passes of the target over one token, drafting included."""


class MarginalValue:
    """What drafters after the first have added to the drafts of those before them."""

    def __init__(self, parts: int) -> None:
        self._added = np.zeros((parts, len(_EXPECTED) + 1, 2))
        self._drafted = np.zeros(self._added.shape[:2], np.int64)
        self._skipped = np.zeros(self._added.shape[:2], np.int64)
        self._all = np.zeros(2)

    def pays(self, part: int, before: Forecast) -> bool:
        """Whether a part should draft, `before` being the forecast without it."""
        cell = part, int(np.searchsorted(_EXPECTED, before.tokens))
        tokens, time = self._added[cell]
        if self._drafted[cell] < _TRIALS or tokens * self._all[1] > time * self._all[0]:
            return True
        self._skipped[cell] += 1
        return bool(self._skipped[cell] % _AGAIN == 0)

    def count(self, part: int, before: Forecast, after: Forecast) -> None:
        """Counts what a part has added."""
        cell = part, int(np.searchsorted(_EXPECTED, before.tokens))
        self._drafted[cell] += 1
        self._added[cell] = _MEMORY * self._added[cell] + np.subtract(after, before)

    def count_step(self, made: Forecast) -> None:
        """Counts a step, once all parts that pay have drafted."""
        self._all = _MEMORY * self._all + made
