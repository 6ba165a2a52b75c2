"""The hidden layer on top of the linear map of states, learned from pairs drawn at random from the newest ones.

Its loss is the squared error of the state, as in EAGLE (2401.15077, section 3.2), and a little cross-entropy against
what the target itself says at the state that came: its output layer over the rows that are scored, which is read off
the state and needs no logits. Steps are Adam's; drafted with is an average of the weights of late.

Cost: for each pair, three times the products of drafting one candidate row. Nothing is drawn from torch's generator.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy, mse_loss, silu

_RATE, _FIRST, _SECOND, _LEAST = 1e-3, 0.9, 0.99, 1e-8
"""Of Adam: the length of a step; what the means of gradients and of their squares keep; added to a root."""
_AVERAGE, _UNSETTLED = 0.998, 10
"""What the average keeps with every step, at most, and the steps before it counts much."""
_OF_CHOICES = 0.1
"""Weight of the cross-entropy."""


class Fitted(NamedTuple):
    """What the linear part and the sums of pairs give."""

    linear: torch.Tensor  # (2 * hidden + 1, hidden)
    sizes: torch.Tensor  # (2 * hidden + 1,): the root mean square of each input
    size: torch.Tensor  # (): of a state
    output: torch.Tensor  # (hidden, rows): of the output layer


class HiddenLayer:
    """Weights that learn, and their average; in one thread at a time."""

    def __init__(self, into: torch.Tensor, out: torch.Tensor) -> None:
        """`into` (2 * hidden + 1, width) and `out` (width, hidden): the average so far, which goes on in place."""
        self.average = [into, out]
        self._weights = [weights.clone().requires_grad_() for weights in self.average]
        self._means = [torch.zeros_like(weights) for weights in self.average]
        self._squares = [torch.zeros_like(weights) for weights in self.average]
        self._steps = 0

    def scaled(self, by: Fitted) -> tuple[torch.Tensor, torch.Tensor]:
        """The average, for inputs and states as they are."""
        into, out = self.average
        return into / by.sizes[:, None], out * by.size

    def learn(self, inputs: torch.Tensor, states: torch.Tensor, by: Fitted) -> None:
        """One step from pairs: inputs (n, 2 * hidden + 1) and the states that followed (n, hidden)."""
        with torch.enable_grad():
            into, out = self._weights
            found = inputs @ by.linear + silu(inputs / by.sizes @ into) @ out * by.size
            said = (states @ by.output).softmax(dim=-1)
            loss = mse_loss(found, states) / by.size**2 + _OF_CHOICES * cross_entropy(found @ by.output, said)
            gradients = torch.autograd.grad(loss, self._weights)
        self._follow(gradients)

    @torch.no_grad()
    def _follow(self, gradients: tuple[torch.Tensor, ...]) -> None:
        """Adam (Kingma and Ba, 1412.6980). torch's own would import its compiler, which takes seconds."""
        self._steps += 1
        first, second = 1 - _FIRST**self._steps, 1 - _SECOND**self._steps
        kept = min(_AVERAGE, self._steps / (self._steps + _UNSETTLED))
        parts = zip(self._weights, gradients, self._means, self._squares, self.average, strict=True)
        for weights, gradient, mean, square, average in parts:
            mean.lerp_(gradient, 1 - _FIRST)
            square.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
            weights.addcdiv_(mean, (square / second).sqrt_().add_(_LEAST), value=-_RATE / first)
            average.lerp_(weights.detach(), 1 - kept)
