"""Calibration: estimate the probability that a candidate is the target's choice, online while decoding.

A stored probability stems from another position, and greedy decoding takes the most probable token whatever its
probability. So candidates are binned by mixed probability, rank and match length, and outcomes are counted at accepted
nodes, whether the candidate was drafted or not. A bin without observations returns the probability itself.

In a batch some sequences are easier to predict than others. So probabilities along chains are also corrected per
sequence, by observed / expected rejections.
"""

from __future__ import annotations

import numpy as np

from .._util.compiled import Record, compiled_part

_PROBABILITIES = np.array([0.005, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 0.97], np.float32)
RANKS = 3
"""Ranks that are distinguished: the best, the second, all others."""
MATCHES = 9
"""Kinds of matches: none; of 1, 2, 3 and 4 tokens; of 5 to 7, 8 to 15, 16 to 31 tokens; longer."""
_UNSUPPORTED = (len(_PROBABILITIES) + 1) * RANKS
CELLS = _UNSUPPORTED * MATCHES
"""Number of bins."""
OUTCOMES = np.dtype(
    [
        ("verified", np.float64),  # drafted tokens of chains, up to the first rejection
        ("rejected", np.float64),
        ("expected", np.float64),  # expected rejections, by the probabilities of these tokens
    ],
    align=True,
)
"""Recent outcomes of chains with exponential decay, for one sequence or for all."""
_PRIOR, _MEMORY = 4.0, 2_000.0
"""Weight of a candidate's own probability, in observations; number of observations above which counts are halved."""
_PRIOR_TOKENS, _OF_SEQUENCE, _OF_ALL = 2.0, 0.9, 0.99
"""Prior of a new sequence, in verified tokens; decay per step for one sequence, and for all."""


def new_calibration(kinds: int = MATCHES) -> np.ndarray:
    """Return counts (cells, 2) float32: chosen candidates of each bin, and all candidates of the bin."""
    return np.zeros((_UNSUPPORTED * kinds, 2), np.float32)


@compiled_part
def match_kind(length: int) -> int:
    """Return the kind of a match of `length` tokens."""
    if length < 5:
        return length
    return 5 if length < 8 else 6 if length < 16 else 7 if length < 32 else 8


@compiled_part
def cell_of(probability: float, rank: int, kind: int, kinds: int = MATCHES) -> int:
    """Return the bin of a candidate; `kind`, below `kinds`, is the kind of its longest match, 0 without one."""
    place = 0
    for bound in _PROBABILITIES:
        place += bound < probability
    return (place * RANKS + min(rank, RANKS - 1)) * kinds + kind


@compiled_part
def calibrated(calibration: np.ndarray, cell: int, probability: float) -> float:
    """Return the calibrated probability of a candidate in this bin."""
    return (calibration[cell, 0] + probability * _PRIOR) / (calibration[cell, 1] + _PRIOR)


@compiled_part
def count(calibration: np.ndarray, cell: int, chosen: bool) -> None:
    """Count one candidate in its bin, and whether it was chosen."""
    calibration[cell, 0] += chosen
    calibration[cell, 1] += 1
    if calibration[cell, 1] > _MEMORY:
        calibration[cell, 0] /= 2
        calibration[cell, 1] /= 2


@compiled_part
def count_chain(tree: np.ndarray, nodes: int, chosen: np.ndarray, own: Record, shared: Record) -> None:
    """Count the outcome of a chain of `nodes` nodes, for its sequence and for all; `chosen` are the tokens after the
    root.
    """
    verified, rejected, expected = 0.0, 0.0, 0.0
    for place in range(min(len(chosen), nodes - 1)):
        verified += 1
        expected += 1 - tree[place].probabilities[0]
        if tree[place + 1].token != chosen[place]:
            rejected = 1.0
            break
    _decay_and_add(own, _OF_SEQUENCE, verified, rejected, expected)
    _decay_and_add(shared, _OF_ALL, verified, rejected, expected)


@compiled_part
def _decay_and_add(outcomes: Record, decay: float, verified: float, rejected: float, expected: float) -> None:
    outcomes.verified = outcomes.verified * decay + verified
    outcomes.rejected = outcomes.rejected * decay + rejected
    outcomes.expected = outcomes.expected * decay + expected


@compiled_part
def corrections(own: Record, shared: Record) -> tuple[float, float]:
    """Return observed / expected rejections of a sequence, and the same ratio for acceptances; the prior is the average
    of all sequences.
    """
    all_wrong = (shared.rejected + 1) / (shared.expected + 1)
    all_right = (shared.verified - shared.rejected + 1) / (shared.verified - shared.expected + 1)
    return (
        (own.rejected + _PRIOR_TOKENS * all_wrong) / (own.expected + _PRIOR_TOKENS),
        (own.verified - own.rejected + _PRIOR_TOKENS * all_right) / (own.verified - own.expected + _PRIOR_TOKENS),
    )


@compiled_part
def corrected(probability: float, correction: tuple[float, float]) -> float:
    """Return the corrected probability, the lower of two estimates. For a probability near 1 scaled rejections stay
    near 0 however many there were; there the acceptances are decisive.
    """
    wrong, right = correction
    return max(
        0.0, min(1 - (1 - probability) * wrong, probability * right) if wrong > 1 else 1 - (1 - probability) * wrong
    )
