"""What a drafter's own overhead takes, and what its steps give in the long run."""

import numpy as np
import pytest

from token_recycling.costs.costs import Costs, OnlineCurve, Overhead

pytestmark = pytest.mark.measured


def new_costs():
    return Costs(lambda sequences, length: OnlineCurve(np.linspace(1, 3, 8)), 1, 10)


def test_work_is_so_much_a_step_and_so_much_a_node():
    overhead, chance = Overhead(), np.random.default_rng(0)
    for nodes in chance.integers(1, 65, 600):
        overhead.count(int(nodes), (0.05 + 0.002 * (nodes - 1)) * chance.uniform(0.8, 1.2))
    assert overhead.step == pytest.approx(0.05, rel=0.1)
    assert overhead.node == pytest.approx(0.002, rel=0.1)
    assert overhead.of(1) == overhead.step
    assert overhead.of(11) == pytest.approx(0.07, rel=0.05)


def test_a_step_that_was_disturbed_counts_as_three_times_as_long():
    """The first step too: a drafter that seemed slow would rest."""
    overhead = Overhead()
    overhead.count(1, 100.0)
    assert overhead.step < 0.05
    for _ in range(100):
        overhead.count(1, 0.1)
    before = overhead.step
    overhead.count(1, 100.0)
    assert overhead.step < 1.03 * before


@pytest.mark.parametrize(("own", "steps"), [(0.2, 20), (5.0, 64), (0.001, 0)])
def test_what_does_not_pay_rests_as_long_as_a_look_takes_a_hundredth(own, steps):
    assert new_costs().back_off(Overhead(rate=0.9), 1, 1.5, own) == steps


def test_what_pays_does_not_rest_in_the_long_run_or_this_once():
    assert new_costs().back_off(Overhead(rate=2.0), 1, 1.5, 0.5) == 0
    assert new_costs().back_off(Overhead(rate=0.9), 1, 1.5, 0.5, predicted=1.9) == 0
    assert new_costs().back_off(Overhead(rate=0.9), 1, 1.5, 0.5, predicted=1.6) > 0, (
        "such forecasts are too high by a third"
    )


def test_a_text_does_not_rest_where_those_that_share_its_passes_are_ahead_together():
    """The other one drafts as well as this one does badly; then it does not."""
    overhead, costs = Overhead(rate=1.1), new_costs()
    for _ in range(20):
        costs.back_off(overhead, 1, 2.0, 0.5)
        costs.back_off(overhead, 4, 2.0, 0.5)
    assert costs.back_off(overhead, 1, 2.0, 0.5) == 0
    for _ in range(80):
        costs.back_off(overhead, 2, 2.0, 0.5)
        costs.back_off(overhead, 1, 2.0, 0.5)
    assert costs.back_off(overhead, 1, 2.0, 0.5) > 0


def test_forecasts_are_believed_as_far_as_they_came_true():
    overhead, costs = Overhead(), new_costs()
    assert costs.forecast_ratio(overhead) == pytest.approx(0.7)
    for _ in range(300):
        costs.back_off(overhead, 2, 1.0, 0.1, predicted=3.0)
    assert costs.forecast_ratio(overhead) == pytest.approx(0.5, abs=0.02)
    assert new_costs().forecast_ratio(overhead) == pytest.approx(0.5, abs=0.02)
    for _ in range(300):
        costs.back_off(overhead, 5, 1.0, 0.1, predicted=3.0)
    assert costs.forecast_ratio(overhead) == 1, "no more than was predicted"
