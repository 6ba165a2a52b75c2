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

from .._shared.learning import AveragedAdam

_RATE = 1e-3
"""Of Adam."""
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
        self._adam = AveragedAdam([into, out], _RATE)

    @property
    def average(self) -> list[torch.Tensor]:
        """The two weights, as they are drafted with."""
        return self._adam.average

    def scaled(self, by: Fitted) -> tuple[torch.Tensor, torch.Tensor]:
        """The average, for inputs and states as they are."""
        into, out = self.average
        return into / by.sizes[:, None], out * by.size

    def learn(self, inputs: torch.Tensor, states: torch.Tensor, by: Fitted) -> None:
        """One step from pairs: inputs (n, 2 * hidden + 1) and the states that followed (n, hidden)."""
        with torch.enable_grad():
            into, out = self._adam.weights
            found = inputs @ by.linear + silu(inputs / by.sizes @ into) @ out * by.size
            said = (states @ by.output).softmax(dim=-1)
            loss = mse_loss(found, states) / by.size**2 + _OF_CHOICES * cross_entropy(found @ by.output, said)
            gradients = torch.autograd.grad(loss, self._adam.weights)
        self._adam.follow(gradients)
