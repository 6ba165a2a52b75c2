"""What a drafter's own work takes, and what its steps give in the long run."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.costs.costs import Costs, OnlineCurve, Work

pytestmark = pytest.mark.measured


def new_costs():
    return Costs(lambda texts, length: OnlineCurve(np.linspace(1, 3, 8)), 1, 10)


def test_work_is_so_much_a_step_and_so_much_a_node():
    work, chance = Work(), np.random.default_rng(0)
    for nodes in chance.integers(1, 65, 600):
        work.count(int(nodes), (0.05 + 0.002 * (nodes - 1)) * chance.uniform(0.8, 1.2))
    assert work.step == pytest.approx(0.05, rel=0.1)
    assert work.node == pytest.approx(0.002, rel=0.1)
    assert work.of(1) == work.step
    assert work.of(11) == pytest.approx(0.07, rel=0.05)


def test_work_is_known_where_all_steps_are_alike():
    work = Work()
    for _ in range(200):
        work.count(9, 0.3)
    assert work.of(9) == pytest.approx(0.3, rel=0.05)


def test_a_step_that_was_disturbed_counts_as_three_times_as_long():
    """The first step too: a drafter that seemed slow would rest."""
    work = Work()
    work.count(1, 100.0)
    assert work.step < 0.05
    for _ in range(100):
        work.count(1, 0.1)
    before = work.step
    work.count(1, 100.0)
    assert work.step < 1.03 * before


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(-1, 10)), min_size=1, max_size=30))
def test_no_work_is_negative(told):
    work = Work()
    for nodes, taken in told:
        work.count(nodes, taken)
        assert min(work.step, work.node) >= -1e-12


@pytest.mark.parametrize(("own", "steps"), [(0.2, 20), (5.0, 64), (0.001, 0)])
def test_what_does_not_pay_rests_as_long_as_a_look_takes_a_hundredth(own, steps):
    assert new_costs().rest(Work(rate=0.9), 1, 1.5, own) == steps


def test_what_pays_does_not_rest_in_the_long_run_or_this_once():
    assert new_costs().rest(Work(rate=2.0), 1, 1.5, 0.5) == 0
    assert new_costs().rest(Work(rate=0.9), 1, 1.5, 0.5, foreseen=1.9) == 0
    assert new_costs().rest(Work(rate=0.9), 1, 1.5, 0.5, foreseen=1.6) > 0, "such forecasts are too high by a third"


def test_a_call_begins_as_the_drafter_and_leaves_it_soon():
    work, first, second = Work(), new_costs(), new_costs()
    for _ in range(2000):
        first.rest(work, 4, 2.0, 0.5)
    rests = [first.rest(work, 1, 1.25, 0.5) > 0 for _ in range(150)]
    assert rests[-1]
    assert not rests[20]
    assert second.rest(work, 1, 1.5, 0.5) == 0, "what the drafter knows is still good"


def test_a_text_does_not_rest_where_those_that_share_its_passes_are_ahead_together():
    """The other one drafts as well as this one does badly; then it does not."""
    work, costs = Work(rate=1.1), new_costs()
    for _ in range(20):
        costs.rest(work, 1, 2.0, 0.5)
        costs.rest(work, 4, 2.0, 0.5)
    assert costs.rest(work, 1, 2.0, 0.5) == 0
    for _ in range(80):
        costs.rest(work, 2, 2.0, 0.5)
        costs.rest(work, 1, 2.0, 0.5)
    assert costs.rest(work, 1, 2.0, 0.5) > 0


def test_forecasts_are_believed_as_far_as_they_came_true():
    work, costs = Work(), new_costs()
    assert costs.trust(work) == pytest.approx(0.7)
    for _ in range(300):
        costs.rest(work, 2, 1.0, 0.1, foreseen=3.0)
    assert costs.trust(work) == pytest.approx(0.5, abs=0.02)
    assert new_costs().trust(work) == pytest.approx(0.5, abs=0.02)
    for _ in range(300):
        costs.rest(work, 5, 1.0, 0.1, foreseen=3.0)
    assert costs.trust(work) == 1, "nothing is promised that was not foreseen"
