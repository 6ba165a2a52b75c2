"""How a drafter learns while it decodes: for a share of the time of passes, by Adam, with an average of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..._util.locks import Lock

_FIRST, _SECOND, _LEAST = 0.9, 0.99, 1e-8
"""Of Adam: what the means of gradients and of their squares keep; added to a root."""
_AVERAGE, _UNSETTLED = 0.998, 10
"""What the average keeps with every step, at most, and the steps before it counts much."""


class Lesson(NamedTuple):
    """What was learned when a text had ended."""

    pairs: int = 0
    batches: int = 0
    seconds: float = 0.0


class Allowance:
    """Time that learning may take, which texts add to."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Below 0 where learning took more."""
        self._changing = Lock()

    def add(self, seconds: float) -> None:
        with self._changing:
            self.seconds += seconds


class AveragedAdam:
    """Weights that learn, and their average, which is what is drafted with; in one thread at a time."""

    def __init__(self, average: Sequence[torch.Tensor], rate: float) -> None:
        """`average`: the weights so far, which go on in place; `rate`: the length of a step."""
        self.average, self._rate = list(average), rate
        self.weights = [weights.clone().requires_grad_() for weights in self.average]
        self._means = [torch.zeros_like(weights) for weights in self.average]
        self._squares = [torch.zeros_like(weights) for weights in self.average]
        self._steps = 0

    @torch.no_grad()
    def follow(self, loss_gradients: Sequence[torch.Tensor]) -> None:
        """Adam (Kingma and Ba, 1412.6980). torch's own would import its compiler, which takes seconds."""
        self._steps += 1
        first, second = 1 - _FIRST**self._steps, 1 - _SECOND**self._steps
        kept = min(_AVERAGE, self._steps / (self._steps + _UNSETTLED))
        parts = zip(self.weights, loss_gradients, self._means, self._squares, self.average, strict=True)
        for weights, gradient, mean, square, average in parts:
            mean.lerp_(gradient, 1 - _FIRST)
            square.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
            weights.addcdiv_(mean, (square / second).sqrt_().add_(_LEAST), value=-self._rate / first)
            average.lerp_(weights.detach(), 1 - kept)
