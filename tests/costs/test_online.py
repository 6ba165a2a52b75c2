"""t(n) learned from steps, on machines that are made up: how near it comes, and whether sizes are chosen as well as by
the truth.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.costs import OnlineCurve, best_size

pytestmark = pytest.mark.measured

N = np.arange(1, 65)
TICK = 0.01
FLAT, LINEAR = np.ones(64), 1 + 0.05 * (N - 1)
STAIRS = 0.5 + 0.5 * np.ceil(N / 8)
MACHINES = {"flat": FLAT, "linear": LINEAR, "stairs": STAIRS, "experts": 1 + 1.5 * (1 - np.exp(-N / 6)) + 0.01 * N}
SEEDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "right": lambda truth: truth,
    "too cheap": lambda truth: truth**0.3,
    "too dear": lambda truth: truth * (1 + 0.02 * (N - 1)),
}
Moment = Callable[[int, np.random.Generator], float]
MOMENTS: dict[str, Moment] = {
    "noisy": lambda step, chance: np.exp(0.15 * chance.standard_normal()) * (10 if chance.random() < 0.03 else 1),
    "busy later": lambda step, chance: np.exp(0.1 * chance.standard_normal()) * (2 if step > 250 else 1),
}


def worth(truth, curve, moment, steps=500):
    """Tokens per time of trees whose size goes by the curve, against those by the truth; the first 100 do not count.

    How sure drafts are lasts for some steps.
    """
    chance = np.random.default_rng(1)
    got, sure = np.zeros((2, 2)), 0.5
    for step in range(steps):
        if chance.random() < 0.2:
            sure = chance.random()
        gains = (0.3 + 0.7 * sure) * (0.75 + 0.2 * sure) ** N[:-1]
        expected = 1 + np.append(0, gains.cumsum())
        ours, best = (best_size(gains, times)[0] for times in (curve.relative, truth))
        curve.took(ours + 1, TICK * truth[ours] * moment(step, chance))
        if step >= 100:
            got += [[expected[size], truth[size]] for size in (ours, best)]
    (tokens, time), (most, least) = got
    return tokens / time / (most / least)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_sizes_are_nearly_as_good_as_by_the_truth(machine, moment):
    """At least 97% where the seed is right, and 93% where it is far from it."""
    truth = MACHINES[machine]
    for seed, least in (("right", 0.97), ("too cheap", 0.93), ("too dear", 0.93)):
        assert worth(truth, OnlineCurve(TICK * SEEDS[seed](truth)), MOMENTS[moment]) > least, seed


@pytest.mark.parametrize("machine", MACHINES)
def test_the_curve_becomes_that_of_the_machine(machine):
    """From sizes of all kinds, whatever the seed was; the machine is busier than when that was measured."""
    truth, chance = MACHINES[machine], np.random.default_rng(0)
    for seed in SEEDS.values():
        curve = OnlineCurve(TICK * seed(truth))
        for nodes in chance.integers(1, 65, 1500):
            curve.took(int(nodes), 3 * TICK * truth[nodes - 1] * np.exp(0.1 * chance.standard_normal()))
        assert curve.relative == pytest.approx(truth / truth[0], rel=0.15)
        assert curve.seconds == pytest.approx(3 * TICK * truth, rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(-1, 1e3)), max_size=40), st.sampled_from([1, 3, 64, 256]))
def test_no_pass_costs_less_than_a_smaller_one(told, sizes):
    curve = OnlineCurve(np.linspace(1, 3, sizes))
    for nodes, seconds in told:
        curve.took(nodes, seconds)
    assert len(curve.relative) == sizes
    assert curve.relative[0] == 1
    assert (np.diff(curve.relative) >= 0).all()
    assert np.isfinite(curve.seconds).all()
