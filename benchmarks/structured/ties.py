"""How near two tokens are where a text parts from `generate`'s: the margin between their logits, and in float32.

Numbers of 16 bits round, and passes over several tokens round otherwise than passes over one. So texts may part where
two tokens are nearly as good; a margin far beyond the error of such numbers would be a fault.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from token_recycling.model.loading import load_model


class Ties:
    """A model's weights as they are in `dtype`, computed with in float32."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._exact = load_model(str(path), dtype, "cpu", None).float()

    @torch.no_grad()
    def parting(self, plain: torch.Tensor, ours: torch.Tensor, logits: torch.Tensor) -> dict[str, Any]:
        """Where two texts (1, length) part, and the margins of the tokens there: plain's logit less ours.

        `logits` (n, vocabulary): those that `generate` took the last n tokens of `plain` from, minus infinity where its
        grammar forbids. `margin` is theirs, `exact` that of float32 after the same text, and `error` how far the margin
        of the two likeliest tokens is from float32's wherever there was a choice: the root of the mean square.
        """
        first = plain.shape[1] - len(logits)
        exact = self._exact(plain).logits[0, first - 1 : -1]
        two = logits.topk(2)
        gaps = torch.stack([values.gather(1, two.indices).diff()[:, 0] for values in (logits, exact)])
        gaps = gaps[:, two.values[:, 1].isfinite()]
        shared = min(plain.shape[1], ours.shape[1])
        place = int((plain[0, :shared] != ours[0, :shared]).nonzero()[0])
        theirs, other = int(plain[0, place]), int(ours[0, place])
        row = place - first
        return {
            "place": row,
            "tokens": [theirs, other],
            "logits": [float(logits[row, token]) for token in (theirs, other)],
            "margin": float(logits[row, theirs] - logits[row, other]),
            "exact": float(exact[row, theirs] - exact[row, other]),
            "error": float(gaps.diff(dim=0).square().mean().sqrt()),
        }
