"""Pearson's chi-square test of observed against expected counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from scipy.stats import chi2

Table = tuple[Sequence[float], Sequence[float]]
"""Observed and expected counts, cell by cell."""


def p_value(*tables: Table) -> float:
    """Return the p-value of several tables together. Cells are merged, the rarest first, until each expects at least
    five. An impossible observation makes it 0.
    """
    statistic, freedom = 0.0, 0
    for observed, expected in tables:
        if any(found and not wanted for found, wanted in zip(observed, expected, strict=True)):
            return 0.0
        cells = [[0.0, 0.0]]
        for wanted, found in sorted(zip(expected, observed, strict=True)):
            if cells[-1][0] >= 5:
                cells.append([0.0, 0.0])
            cells[-1] = [cells[-1][0] + wanted, cells[-1][1] + found]
        statistic += sum((found - wanted) ** 2 / wanted for wanted, found in cells)
        freedom += len(cells) - 1
    return float(chi2.sf(statistic, freedom))


def fit(seen: Counter[tuple[int, ...]], texts: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the p-value of the counts `seen` of all possible `texts` (n, length) with probabilities `exact` (n,)."""
    return p_value(([seen[tuple(text)] for text in texts.tolist()], (exact * seen.total()).tolist()))
