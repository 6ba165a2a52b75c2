"""What may be known of a text before it is decoded: what it begins with, what is expected of it, and a limit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..model.prefixes import Prefixes


@dataclass(frozen=True)
class Known:
    """What may be known of a text before it is decoded; the text is the same without."""

    prefixes: Prefixes | None = None
    """The texts among which its beginning is looked for, and kept."""
    prediction: torch.Tensor | None = None
    """(n,) int64: what is expected to follow; drafted from, never read by the target."""
    nodes: int | None = None
    """Drafted tokens of a pass at most; None for no limit but the drafter's own."""


NOTHING_KNOWN = Known()
