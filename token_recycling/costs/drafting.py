"""What drafting takes besides the pass, and whether it pays in the long run.

A drafter's own work is so much a step and so much a node; both are learned from how long it took, and belong to the
time in which a tree must bring its tokens. And they are spent where nothing is drafted in the end. So whether to draft
at all is decided by the long run: by the tokens per time of past steps that were drafted, all they took included,
against plain decoding. What all texts of a drafter had is where a text begins; its own steps soon outweigh that. Texts
that share passes decide by what all of them had: a pass takes as long as the largest tree among them wants, so that one
that rests alone saves nothing.

Cost per step: a few additions.
"""

from __future__ import annotations

from typing import NamedTuple

from .._util.locks import Lock

_OF_DRAFTER, _OF_CALL = 0.999, 0.98
"""What older steps keep with every new one."""
_STEPS, _RATE = 16.0, 1.25
"""A text begins as if so many steps had been made; the very first one as if drafting paid a little."""
_WORK, _WORKED = 0.02, 4.0
"""Of a step, as long as nothing is known: as if it had been seen four times."""
_LOOKS, _LONGEST = 0.01, 64
"""Where drafting does not pay, it is tried again so often that this takes a hundredth of the time, or every 64 steps.
"""
_OUTLIER = 3.0
"""Work counts as at most so many times what was to be expected, as where the machine did something else meanwhile."""


class Pace:
    """Tokens per time of steps, in passes over a lone root: 1 for plain decoding. Threads may count at once."""

    def __init__(self, rate: float = _RATE, memory: float = _OF_DRAFTER) -> None:
        self._tokens, self._time, self._memory = rate * _STEPS, _STEPS, memory
        self._counting = Lock()

    @property
    def rate(self) -> float:
        """Tokens per time."""
        return self._tokens / self._time

    def count(self, tokens: float, time: float) -> None:
        """A step gave so many tokens in that time."""
        with self._counting:
            self._tokens = self._memory * self._tokens + tokens
            self._time = self._memory * self._time + time

    def of_call(self) -> Pace:
        """That of a text that begins, or of several that share passes."""
        return Pace(self.rate, _OF_CALL)


class Rests:
    """Of one text: for how many steps nothing is drafted, since that does not pay."""

    def __init__(self, of_drafter: Pace, of_call: Pace) -> None:
        """`of_call`: the pace of the texts that share its passes, by which it is decided."""
        self._call, self._drafter = of_call, of_drafter
        self._left = 0

    def next(self) -> bool:
        """Whether nothing is to be drafted for the next step. To be asked once a step."""
        resting = self._left > 0
        self._left -= resting
        return resting

    def reckon(self, tokens: int, passes: float, own: float, paid: bool = False) -> None:
        """Counts what a drafted step gave and took in passes, `own` of them whether or not anything was verified. Rests
        where drafting does not pay in the long run, unless this step was foreseen to have `paid`.
        """
        for pace in (self._call, self._drafter):
            pace.count(tokens, passes)
        if self._call.rate < 1 and not paid:
            self._left = min(int(own / _LOOKS), _LONGEST)


class Work(NamedTuple):
    """What a drafter's own work takes, in passes over a lone root."""

    step: float
    """In every step in which it drafts and learns."""
    node: float
    """For every node besides."""

    def of(self, nodes: int) -> float:
        """In a step of `nodes` nodes, the root included."""
        return self.step + self.node * (nodes - 1)


class OwnWork:
    """Learns that: least squares, older steps fading. Threads may count at once."""

    def __init__(self) -> None:
        self._sums = [_WORKED, 0.0, 0.0, _WORK * _WORKED, 0.0]
        """Of steps, nodes, squared nodes, time, and time by nodes."""
        self._counting = Lock()
        self.known = Work(_WORK, 0.0)

    def count(self, nodes: int, time: float) -> None:
        """Drafting `nodes` nodes, the root included, and learning from them took so long."""
        with self._counting:
            drafted = nodes - 1
            # Below 0 where another thread has compiled meanwhile.
            time = max(0.0, min(time, _OUTLIER * self.known.of(nodes)))
            seen = (1, drafted, drafted**2, time, drafted * time)
            self._sums = [_OF_DRAFTER * old + new for old, new in zip(self._sums, seen, strict=True)]
            self.known = self._fitted()

    def _fitted(self) -> Work:
        steps, nodes, squares, time, products = self._sums
        spread = squares - nodes * nodes / steps
        slope = (products - nodes * time / steps) / spread if spread > 1 else 0.0
        slope = min(max(0.0, slope), time / max(1.0, nodes))
        return Work((time - slope * nodes) / steps, slope)
