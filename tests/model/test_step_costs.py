"""What the steps of a call cost, and how long passes take now."""

from __future__ import annotations

import pytest
from support.runs import Costs

from token_recycling.costs.curve import CostCurve
from token_recycling.model.step_costs import StepCosts

CURVE = CostCurve(256, (1, 2, 4, 6), (1.0, 1.5, 3.0, 6.0))


def test_texts_of_a_batch_share_a_pass() -> None:
    costs = StepCosts(Costs(CURVE), texts=2, length=10)
    assert costs.plain == 1.5
    assert costs.by_nodes.tolist() == [1, 2, 4]
    assert costs.unit == 0.75


def test_the_unit_follows_what_steps_take() -> None:
    """Passes take twice as long as when they were measured, then as long as they did."""
    costs = StepCosts(Costs(CURVE), texts=2, length=10)
    costs.took(2, 100.0)  # nobody has asked yet
    assert costs.unit == 0.75
    for factor in (2, 1):
        for nodes in (1, 2, 3, 4) * 100:  # a drafter may give more nodes than were measured
            costs.took(nodes, factor * 1.5 * [1, 2, 4, 4][nodes - 1])
        assert costs.unit == pytest.approx(factor * 0.75, rel=0.01)


def test_nothing_is_measured_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "curve", None)
    StepCosts(Costs(CURVE), texts=1, length=10).took(3, 1.0)
