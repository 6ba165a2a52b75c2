"""What drafting takes besides the pass, and what it gives in the long run.

A drafter's own work is so much a step and so much a node; both are learned from how long it took, and belong to the
time in which a tree must bring its tokens. And they are spent where nothing is drafted in the end. So whether to draft
at all is decided by the long run: by the tokens per time of past steps that were drafted, all they took included,
against plain decoding. And how far its forecasts are to be believed, by what past ones foresaw and what came of them:
of a new text they promise too much. What all texts of a drafter had is where a text begins; its own steps soon outweigh
that (`costs.Costs.rest`).

Cost per step: a few additions.
"""

from __future__ import annotations

from .._util.locks import Lock

_KEPT = 0.999
"""What older steps keep with every new one."""
_STEPS, _RATE = 16.0, 1.25
"""A text begins as if so many steps had been made; the very first one as if drafting paid a little."""
_FORESEEN, _CAME = 8.0, 0.7
"""And so many tokens foreseen; the very first time as if this share of them had come."""
_WORK, _WORKED = 0.02, 4.0
"""Of a step, as long as nothing is known: as if it had been seen four times."""
_OUTLIER = 3.0
"""Work counts as at most so many times what was to be expected, as where the machine did something else meanwhile."""


class Work:
    """What a drafter's own work takes, in passes over a lone root, and the steps that it drafted: of all its texts.

    Least squares, older steps fading. Threads may count at once.
    """

    def __init__(self, step: float = _WORK, rate: float = _RATE) -> None:
        """`step` and `rate`: what a step is expected to take, and tokens per time, as long as nothing is known."""
        self.step, self.node = step, 0.0
        """In every step in which it drafts and learns; and for every node besides."""
        self._sums = [_WORKED, 0.0, 0.0, step * _WORKED, 0.0]
        """Of steps, nodes, squared nodes, time, and time by nodes."""
        self._steps = [rate * _STEPS, _STEPS, _CAME * _FORESEEN, _FORESEEN]
        """Tokens and time, and of drafted tokens those that came and those that were foreseen."""
        self._counting = Lock()

    def of(self, nodes: int) -> float:
        """In a step of `nodes` nodes, the root included."""
        return self.step + self.node * (nodes - 1)

    def count(self, nodes: int, time: float) -> None:
        """Drafting `nodes` nodes, the root included, and learning from them took so long."""
        with self._counting:
            drafted = nodes - 1
            # Below 0 where another thread has compiled meanwhile.
            time = max(0.0, min(time, _OUTLIER * self.of(nodes)))
            seen = (1, drafted, drafted**2, time, drafted * time)
            self._sums = [_KEPT * old + new for old, new in zip(self._sums, seen, strict=True)]
            steps, nodes_, squares, total, products = self._sums
            spread = squares - nodes_ * nodes_ / steps
            slope = (products - nodes_ * total / steps) / spread if spread > 1 else 0.0
            self.node = min(max(0.0, slope), total / max(1.0, nodes_))
            self.step = (total - self.node * nodes_) / steps

    def gave(self, *step: float) -> None:
        """A step gave so many tokens in so many passes, of drafted tokens so many where so many were foreseen."""
        with self._counting:
            self._steps = [_KEPT * old + new for old, new in zip(self._steps, step, strict=True)]

    def begun(self) -> list[float]:
        """What a call begins with: the same four sums, as if it had made some steps as all before it."""
        tokens, time, came, foreseen = self._steps
        return [_STEPS * tokens / time, _STEPS, _FORESEEN * came / foreseen, _FORESEEN]
