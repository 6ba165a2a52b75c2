"""How well sampled texts fit their exact probabilities (Pearson's chi-square)."""

from __future__ import annotations

from collections import Counter

import torch
from scipy.stats import chisquare


def fit(seen: Counter[tuple[int, ...]], texts: torch.Tensor, exact: torch.Tensor, least: int = 0) -> float:
    """The p-value of `seen` for all possible `texts` (n, length) of probabilities `exact` (n,); rare ones count
    together. More than `least` texts must be expected five times or more.
    """
    counts = torch.tensor([seen[tuple(text.tolist())] for text in texts]).double()
    expected = exact * seen.total()
    often = expected >= 5
    assert often.sum() > least
    observed = [*counts[often].tolist(), float(counts[~often].sum())]
    wanted = [*expected[often].tolist(), float(expected[~often].sum())]
    return float(chisquare(observed, wanted).pvalue)
