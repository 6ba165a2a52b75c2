"""Runs of drafters in a test: a stream decoded to its end, a drafter started by hand, costs that are given.

Beside `tiny`, which imports nothing of the package, so that it serves where an engine brings another transformers.
"""

from __future__ import annotations

from typing import Any

import torch

import token_recycling as tr
from token_recycling.costs.curve import CostCurve
from token_recycling.cuda_graphs import Fast
from token_recycling.drafter import Drafter, TextDrafter
from token_recycling.model.pass_costs import PassCosts
from token_recycling.model.step_costs import StepCosts
from token_recycling.model.tree_model import TreeModel


def decoded(
    model: Any, ids: torch.Tensor, drafter: Any, fast: Fast = True, **arguments: Any
) -> tuple[list[int], tr.Stats]:
    """The tokens that `stream` emits, by fast steps if nothing else is said, and the statistics."""
    stats = tr.Stats()
    steps = tr.stream(model, ids, drafter, fast=fast, stats=stats, **arguments)
    return [token for step in steps for token in step.tokens], stats


def begun(drafter: Drafter, prompt: torch.Tensor | list[int], target: TreeModel) -> TextDrafter:
    """What drafts for a text, started as the loop does."""
    prompt = torch.as_tensor(prompt)
    return drafter.start(prompt, target, StepCosts(PassCosts(target), 1, len(prompt)))


def texts_of(drafter: Drafter) -> list[TextDrafter]:
    """What the drafter starts from now on, in order."""
    started, start = [], drafter.start
    drafter.start = lambda *given: (started.append(start(*given)), started[-1])[1]
    return started


class Costs(PassCosts):
    """One curve for every length."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve

    def curve(self, length: int) -> CostCurve:
        return self._curve
