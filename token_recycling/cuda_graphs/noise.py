"""Random numbers by position in the sequence: what a seed gives does not depend on drafts.

A token sampled from log-probabilities is their argmax with Gumbel noise added (Gumbel, 1954). A stateful generator
would give other numbers whenever a step verifies more or fewer nodes. Here each number is a hash of the seed, the
position and the token (SplitMix64: Steele et al., *Fast Splittable Pseudorandom Number Generators*, OOPSLA 2014), so
that a sequence depends on its seed alone, and a captured step needs no state. Cost: some twenty elementwise operations
over n rows of the vocabulary.
"""

from __future__ import annotations

import torch


def _signed(number: int) -> int:
    """The 64 bits of a number as int64 has them."""
    return number - (number >> 63 << 64)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right: that of int64 fills up with the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """64 bits of which each depends on all that are given; int64."""
    for by, factor in _ROUNDS:
        bits = (bits ^ _shifted(bits, by)) * factor
    return bits ^ _shifted(bits, 31)


def gumbel(seed: torch.Tensor, places: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Gumbel noise (n, vocabulary) float32 for each of `places` (n,) int64 in the sequence of that `seed` (1,) int64.

    An unlikely token wins by a uniform number near 0. Numbers of 24 bits, as float32 has them, are 0 once in some
    hundred samples from a large vocabulary, and 0 would always win. So there are 48.
    """
    tokens = torch.arange(1, vocabulary + 1, device=places.device)
    bits = _mixed(_mixed(seed + (places + 1) * _GAMMA)[:, None] + tokens * _GAMMA)
    coarse, fine = _shifted(bits, 40), _shifted(bits, 16) & (2**24 - 1)
    uniform = coarse * 2.0**-24 + fine * 2.0**-48
    return -(-torch.log1p(-uniform.clamp(2.0**-50, 1 - 2.0**-24))).log()
