"""What the steps of a call cost: by what was measured at first, then by what steps take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import tiny
from support.runs import Costs

from token_recycling.costs.curve import CostCurve
from token_recycling.model import pass_costs as measuring
from token_recycling.model.pass_costs import PassCosts
from token_recycling.model.step_costs import StepCosts
from token_recycling.model.tree_model import TreeModel

CURVE = CostCurve(256, (1, 2, 4, 6), (1.0, 1.5, 3.0, 6.0))


@pytest.fixture
def target() -> TreeModel:
    return TreeModel(tiny.llama(max_position_embeddings=100_000))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths that were measured; every measurement gives the same curve."""
    lengths: list[int] = []

    def measure(target: TreeModel, length: int, *others: object) -> CostCurve:
        lengths.append(length)
        return CURVE

    monkeypatch.setattr(measuring, "measure", measure)
    return lengths


def test_texts_of_a_batch_share_a_pass() -> None:
    costs = StepCosts(Costs(CURVE), texts=2, length=10)
    assert costs.plain == 1.5
    assert costs.by_nodes.tolist() == [1, 2, 4]
    assert [costs.of(nodes) for nodes in (1, 3, 9)] == [1, 4, 4]
    assert costs.in_passes(0.75) == 1


def test_costs_follow_what_steps_take() -> None:
    """Passes take twice as long as when they were measured, then as long as they did; three nodes cost as two."""
    costs = StepCosts(Costs(CURVE), texts=2, length=10)
    costs.took(2, 100.0, 10)  # nobody has asked yet
    assert costs.by_nodes.tolist() == [1, 2, 4]
    for factor in (2, 1):
        for nodes in (1, 2, 3, 4) * 100:  # a drafter may give more nodes than were measured
            costs.took(nodes, factor * 1.5 * [1, 2, 2, 2][nodes - 1], 10)
        assert costs.in_passes(0.75) == pytest.approx(1 / factor, rel=0.05)
        assert costs.by_nodes == pytest.approx([1, 2, 2], rel=0.1)


def test_texts_come_and_go() -> None:
    costs = StepCosts(Costs(CURVE), texts=1, length=10)
    costs.share(2, 10)
    assert not costs.asked
    assert costs.by_nodes.tolist() == [1, 2, 4]
    assert costs.asked
    costs.share(1, 10)
    assert costs.by_nodes.tolist() == [1, 1.5, 2.25, 3, 4.5, 6]
    costs.share(6, 10)
    assert costs.by_nodes.tolist() == [1]


def test_nothing_is_measured_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Costs, "online", None)
    StepCosts(Costs(CURVE), texts=1, length=10).took(3, 1.0, 10)


def test_what_is_learned_is_shared_by_calls_with_as_many_texts(target: TreeModel, measured: list[int]) -> None:
    one, other, two = [StepCosts(PassCosts(target), texts, 10) for texts in (1, 1, 2)]
    before = [costs.by_nodes.tolist() for costs in (one, other, two)]
    for _ in range(50):
        one.took(1, 1.0, 11)
        one.took(6, 1.0, 11)
    assert one.by_nodes.tolist() == other.by_nodes.tolist() != before[0] == before[1]
    assert two.by_nodes.tolist() == before[2]
    assert StepCosts(PassCosts(target), 1, 200).by_nodes.tolist() == one.by_nodes.tolist()
    assert StepCosts(PassCosts(TreeModel(tiny.llama())), 1, 10).by_nodes.tolist() == before[0]


def test_a_text_that_grows_goes_on_with_what_it_knows(target: TreeModel, measured: list[int]) -> None:
    """It does not wait for a measurement; and what is learned of longer texts does not change the shorter ones'."""
    costs = StepCosts(PassCosts(target), 1, 250)
    assert costs.by_nodes[-1] == 6
    for _ in range(100):
        costs.took(1, 1.0, 256)
        costs.took(6, 2.0, 256)
    short = costs.by_nodes
    assert short[-1] == pytest.approx(2, rel=0.1)
    costs.took(6, 2.0, 257)
    assert costs.by_nodes[-1] == pytest.approx(2, rel=0.45)
    for _ in range(100):
        costs.took(1, 1.0, 300)
        costs.took(6, 9.0, 300)
    assert costs.by_nodes[-1] > 2 * short[-1]
    assert measured == [256]
    assert StepCosts(PassCosts(target), 1, 256).by_nodes.tolist() == short.tolist()
    assert StepCosts(PassCosts(target), 1, 1000).by_nodes.tolist() == costs.by_nodes.tolist()


def test_a_saved_curve_is_what_longer_texts_begin_with(target: TreeModel, measured: list[int]) -> None:
    PassCosts(target).keep([CostCurve(1024, (1, 2, 4), (1.0, 2.0, 3.0))])
    costs = StepCosts(PassCosts(target), 1, 250)
    assert costs.by_nodes == pytest.approx(CURVE.relative())
    costs.took(1, 1.0, 257)
    assert costs.by_nodes == pytest.approx([1, 2, 2.5, 3], rel=0.25)


def test_the_trees_that_are_timed_are_of_tokens_that_are_like_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Again and again where there are too few; all different where none are given."""
    target, found = TreeModel(tiny.llama()), []
    of = target.inputs.of
    monkeypatch.setattr(
        target.inputs, "of", lambda drafts, *rest: (found.append(drafts[0].tokens), of(drafts, *rest))[1]
    )
    for like in (torch.tensor([5, 9, 5]), None):
        measuring.measure(target, 20, (1, 8), seconds=0, like=like)
    assert found[1].tolist() == [5, 9, 5, 5, 9, 5, 5, 9]
    assert len(np.unique(found[-1])) == 8
