"""Runs of drafters in a test: a stream decoded to its end, a drafter started by hand, costs that are given.

Beside `tiny`, which imports nothing of the package, so that it serves where an engine brings another transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import token_recycling as tr
from token_recycling.costs.curve import CostCurve
from token_recycling.costs.online import OnlineCurve
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


def fix_costs(monkeypatch: pytest.MonkeyPatch, curve_of: Callable[[PassCosts], CostCurve]) -> None:
    """Says what passes cost, whatever they take: by a curve for each model, at every length."""
    monkeypatch.setattr(PassCosts, "curve", lambda costs, length, like=None: curve_of(costs))
    monkeypatch.setattr(
        PassCosts, "online", lambda costs, length, texts, *_, **__: OnlineCurve(curve_of(costs).times(texts))
    )
    monkeypatch.setattr(OnlineCurve, "took", lambda *_: None)


class Costs(PassCosts):
    """One curve for every length."""

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve

    def curve(self, length: int, like: torch.Tensor | None = None) -> CostCurve:
        return self._curve

    def online(self, length: int, texts: int, *others: Any, **options: Any) -> OnlineCurve:
        return OnlineCurve(self._curve.times(texts))

    def agreed(self, value: float) -> float:
        return value
