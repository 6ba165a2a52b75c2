"""What a drafter's own work takes, and what its steps give in the long run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.costs.drafting import OwnWork, Pace, Rests


def test_work_is_so_much_a_step_and_so_much_a_node() -> None:
    own, chance = OwnWork(), np.random.default_rng(0)
    for nodes in chance.integers(1, 65, 600):
        own.count(int(nodes), (0.05 + 0.002 * (nodes - 1)) * chance.uniform(0.8, 1.2))
    assert own.known.step == pytest.approx(0.05, rel=0.1)
    assert own.known.node == pytest.approx(0.002, rel=0.1)
    assert own.known.of(1) == own.known.step
    assert own.known.of(11) == pytest.approx(0.07, rel=0.05)


def test_work_is_known_where_all_steps_are_alike() -> None:
    own = OwnWork()
    for _ in range(200):
        own.count(9, 0.3)
    assert own.known.of(9) == pytest.approx(0.3, rel=0.05)


def test_a_step_that_was_disturbed_counts_as_three_times_as_long() -> None:
    """The first step too: a drafter that seemed slow would rest."""
    own = OwnWork()
    own.count(1, 100.0)
    assert own.known.step < 0.05
    for _ in range(100):
        own.count(1, 0.1)
    before = own.known.step
    own.count(1, 100.0)
    assert own.known.step < 1.03 * before


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(-1, 10)), min_size=1, max_size=30))
def test_no_work_is_negative(told: list[tuple[int, float]]) -> None:
    own = OwnWork()
    for nodes, taken in told:
        own.count(nodes, taken)
        assert min(own.known) >= -1e-12


def test_the_pace_of_a_call_begins_as_the_drafters_and_leaves_it_soon() -> None:
    drafter = Pace()
    for _ in range(4000):
        drafter.count(4, 2)
    call = drafter.of_call()
    assert call.rate == drafter.rate == pytest.approx(2, rel=0.01)
    for _ in range(60):
        call.count(1, 1.25)
    assert call.rate == pytest.approx(0.9, rel=0.1)
    assert drafter.rate == pytest.approx(2, rel=0.01)


def test_what_does_not_pay_rests_as_long_as_a_look_takes_a_hundredth() -> None:
    for own, steps in ((0.2, 20), (5.0, 64), (0.001, 0)):
        rests = Rests(Pace(), Pace(rate=0.9))
        assert not rests.next()
        rests.reckon(1, 1.5, own)
        assert [rests.next() for _ in range(steps + 1)] == [True] * steps + [False]


def test_what_pays_does_not_rest_in_the_long_run_or_this_once() -> None:
    rests = Rests(Pace(), Pace(rate=2.0))
    rests.reckon(1, 1.5, 0.5)
    assert not rests.next()
    rests = Rests(Pace(), Pace(rate=0.9))
    rests.reckon(1, 1.5, 0.5, paid=True)
    assert not rests.next()


def test_a_text_does_not_rest_where_those_that_share_its_passes_are_ahead_together() -> None:
    drafter, call = Pace(), Pace(rate=1.1)
    unlucky, lucky = Rests(drafter, call), Rests(drafter, call)
    for _ in range(20):
        unlucky.reckon(1, 2.0, 0.5)
        lucky.reckon(4, 2.0, 0.5)
    assert not unlucky.next()
    for _ in range(80):
        lucky.reckon(2, 2.0, 0.5)
        unlucky.reckon(1, 2.0, 0.5)
    assert unlucky.next()
