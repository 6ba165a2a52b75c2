"""Pairs of states that follow one another, as they wait to be learned from."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._shared.ring import Ring


class StatePairs(NamedTuple):
    """Pairs of states, in half precision."""

    states: torch.Tensor  # (n, hidden) bfloat16: those before the tokens
    tokens: torch.Tensor  # (n,) int64
    following: torch.Tensor  # (n, hidden) bfloat16: those at the tokens


class PairRing(Ring[StatePairs]):
    """The newest pairs of all texts."""

    def __init__(self, hidden: int) -> None:
        super().__init__(4 * hidden + 8)

    def add(self, states: torch.Tensor, tokens: torch.Tensor, following: torch.Tensor) -> None:
        """Lets pairs wait, of states (n, hidden) of any type."""
        self.put(StatePairs(states.to(torch.bfloat16), tokens, following.to(torch.bfloat16)))
