"""How often a candidate of a kind is what the target chooses, learned while decoding.

A stored probability is from another place in the sequence, and greedy decoding takes the likeliest token however likely
it is. So candidates are divided into kinds by mixed probability, rank and match length, and counted at accepted nodes,
drafted or not. Until there are observations of a kind, the probability itself is believed.
"""

from __future__ import annotations

import numpy as np

from .._util.compiled import compiled_part

_PROBABILITIES = np.array([0.005, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97], np.float32)
RANKS = 3
"""Ranks that are told apart: the best, the second, all others."""
MATCHES = 8
"""Kinds of matches: none, of 1, 2, 3 and 4 tokens, of 5 to 7, of 8 to 15, of more."""
_UNSUPPORTED = (len(_PROBABILITIES) + 1) * RANKS
CELLS = _UNSUPPORTED * MATCHES
"""Number of kinds of candidates."""
_PRIOR, _MEMORY = 4.0, 2_000.0
"""Observations that a candidate's own probability counts for; beyond how many of a kind older ones fade."""


def new_calibration(kinds: int = MATCHES) -> np.ndarray:
    """(cells, 2) float32: how many candidates of each kind were chosen, and how many there were."""
    return np.zeros((_UNSUPPORTED * kinds, 2), np.float32)


@compiled_part
def match_kind(length: int) -> int:
    """The kind of a match of `length` tokens."""
    if length < 5:
        return length
    return 5 if length < 8 else 6 if length < 16 else 7


@compiled_part
def cell_of(probability: float, rank: int, kind: int, kinds: int = MATCHES) -> int:
    """The kind of a candidate; `kind`, below `kinds`, is that of the match that supports it, 0 where none does."""
    place = 0
    for bound in _PROBABILITIES:
        place += bound < probability
    return (place * RANKS + min(rank, RANKS - 1)) * kinds + kind


@compiled_part
def calibrated(calibration: np.ndarray, cell: int, probability: float) -> float:
    """How likely a candidate of this kind is to be chosen."""
    return (calibration[cell, 0] + probability * _PRIOR) / (calibration[cell, 1] + _PRIOR)


@compiled_part
def count(calibration: np.ndarray, cell: int, chosen: bool) -> None:
    """One more candidate of this kind, and whether it was chosen."""
    calibration[cell, 0] += chosen
    calibration[cell, 1] += 1
    if calibration[cell, 1] > _MEMORY:
        calibration[cell, 0] /= 2
        calibration[cell, 1] /= 2
