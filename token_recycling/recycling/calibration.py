"""Probability that a candidate of a kind is the target's choice, learned while decoding.

A stored probability stems from another place in a sequence, and greedy decoding takes the most probable token whatever
its probability. So candidates are binned by mixed probability, rank and match length, and their outcomes are counted at
accepted nodes, drafted or not. A bin without observations returns the probability itself.
"""

from __future__ import annotations

import numpy as np

from .._util.compiled import compiled_part

_PROBABILITIES = np.array([0.005, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97], np.float32)
RANKS = 3
"""Ranks that are distinguished: the best, the second, all others."""
MATCHES = 9
"""Kinds of matches: none, of 1, 2, 3 and 4 tokens, of 5 to 7, of 8 to 15, of 16 to 31, longer ones."""
_UNSUPPORTED = (len(_PROBABILITIES) + 1) * RANKS
CELLS = _UNSUPPORTED * MATCHES
"""Number of kinds of candidates."""
OUTCOMES = np.dtype(
    [
        ("verified", np.float64),  # drafted tokens of chains, up to the first one rejected
        ("rejected", np.float64),
        ("expected", np.float64),  # rejections, by the probabilities of these tokens
    ],
    align=True,
)
"""Recent outcomes of chains, of one sequence or of all, with exponential decay."""
_PRIOR, _MEMORY = 4.0, 2_000.0
"""Observations that a candidate's own probability counts for; number of observations beyond which older ones decay."""


def new_calibration(kinds: int = MATCHES) -> np.ndarray:
    """Return counts (cells, 2) float32: chosen candidates of each kind, and all of them."""
    return np.zeros((_UNSUPPORTED * kinds, 2), np.float32)


@compiled_part
def match_kind(length: int) -> int:
    """Return the kind of a match of `length` tokens."""
    if length < 5:
        return length
    return 5 if length < 8 else 6 if length < 16 else 7 if length < 32 else 8


@compiled_part
def cell_of(probability: float, rank: int, kind: int, kinds: int = MATCHES) -> int:
    """Return the kind of a candidate; `kind`, below `kinds`, is that of the match that supports it, 0 without one."""
    place = 0
    for bound in _PROBABILITIES:
        place += bound < probability
    return (place * RANKS + min(rank, RANKS - 1)) * kinds + kind


@compiled_part
def calibrated(calibration: np.ndarray, cell: int, probability: float) -> float:
    """Return the calibrated probability of a candidate of this kind."""
    return (calibration[cell, 0] + probability * _PRIOR) / (calibration[cell, 1] + _PRIOR)


@compiled_part
def count(calibration: np.ndarray, cell: int, chosen: bool) -> None:
    """Count one candidate of this kind, and whether it was chosen."""
    calibration[cell, 0] += chosen
    calibration[cell, 1] += 1
    if calibration[cell, 1] > _MEMORY:
        calibration[cell, 0] /= 2
        calibration[cell, 1] /= 2
