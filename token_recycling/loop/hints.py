"""Hints for a request before it is decoded: cached prefixes, a predicted output, and a limit on drafted nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..model.prefixes import Prefixes


@dataclass(frozen=True, eq=False)
class Hints:
    """Hints for one request; its output is the same without them."""

    prefixes: Prefixes | None = None
    """Prefix cache: the beginning of the request is looked up there, and kept there."""
    prediction: torch.Tensor | None = None
    """(n,) int64: expected output; a source of drafts that the target never reads."""
    nodes: int | None = None
    """Maximum number of drafted nodes in a forward pass; None for the drafter's own limit."""


NO_HINTS = Hints()
