"""Runs of drafters in a test: a stream decoded to its end, a drafter started by hand, costs that are given.

Beside `tiny`, which imports nothing of the package, so that it serves where an engine brings another transformers.
"""

from __future__ import annotations

from typing import Any

import torch

import token_recycling as tr
from token_recycling.costs.curve import CostCurve
from token_recycling.cuda_graphs import Fast
from token_recycling.drafter import Drafter
from token_recycling.model.pass_costs import PassCosts
from token_recycling.model.tree_model import TreeModel


def decoded(
    model: Any, ids: torch.Tensor, drafter: Any, fast: Fast = True, **arguments: Any
) -> tuple[list[int], tr.Stats]:
    """The tokens that `stream` emits, by fast steps if nothing else is said, and the statistics."""
    stats = tr.Stats()
    steps = tr.stream(model, ids, drafter, fast=fast, stats=stats, **arguments)
    return [token for step in steps for token in step.tokens], stats


def begin(drafter: Drafter, prompts: list[torch.Tensor], target: TreeModel, costs: PassCosts | None = None) -> None:
    """Starts a drafter on texts as the loop does."""
    drafter.start(prompts, target, costs or PassCosts(target))


class Costs(PassCosts):
    """One curve for every length."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve

    def curve(self, length: int) -> CostCurve:
        return self._curve
