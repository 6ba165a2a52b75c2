"""Online estimates of t(n) on simulated machines: accuracy, and tree sizes compared with those of the true curve."""

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
    "correct": lambda truth: truth,
    "too cheap": lambda truth: truth**0.3,
    "too expensive": lambda truth: truth * (1 + 0.02 * (N - 1)),
}
Moment = Callable[[int, np.random.Generator], float]
MOMENTS: dict[str, Moment] = {
    "noisy": lambda step, chance: np.exp(0.15 * chance.standard_normal()) * (10 if chance.random() < 0.03 else 1),
    "busy later": lambda step, chance: np.exp(0.1 * chance.standard_normal()) * (2 if step > 250 else 1),
}


def relative_throughput(truth, curve, moment, steps=500):
    """Return tokens per second with sizes by the curve, relative to sizes by the truth; the first 100 steps do not
    count. The confidence of drafts changes every few steps.
    """
    chance = np.random.default_rng(1)
    got, sure = np.zeros((2, 2)), 0.5
    for step in range(steps):
        if chance.random() < 0.2:
            sure = chance.random()
        gains = (0.3 + 0.7 * sure) * (0.75 + 0.2 * sure) ** N[:-1]
        expected = 1 + np.append(0, gains.cumsum())
        ours, best = (best_size(gains, times)[0] for times in (curve.relative, truth))
        curve.record_time(ours + 1, TICK * truth[ours] * moment(step, chance))
        if step >= 100:
            got += [[expected[size], truth[size]] for size in (ours, best)]
    (tokens, time), (most, least) = got
    return tokens / time / (most / least)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_sizes_are_nearly_as_good_as_with_the_true_curve(machine, moment):
    """At least 97% of the throughput with a correct initial curve, and 93% with a wrong one."""
    truth = MACHINES[machine]
    for seed, least in (("correct", 0.97), ("too cheap", 0.93), ("too expensive", 0.93)):
        assert relative_throughput(truth, OnlineCurve(TICK * SEEDS[seed](truth)), MOMENTS[moment]) > least, seed


@pytest.mark.parametrize("machine", MACHINES)
def test_curve_converges_to_that_of_the_machine(machine):
    """With all sizes and any initial curve; the machine is busier than when the initial curve was measured."""
    truth, chance = MACHINES[machine], np.random.default_rng(0)
    for seed in SEEDS.values():
        curve = OnlineCurve(TICK * seed(truth))
        for nodes in chance.integers(1, 65, 1500):
            curve.record_time(int(nodes), 3 * TICK * truth[nodes - 1] * np.exp(0.1 * chance.standard_normal()))
        assert curve.relative == pytest.approx(truth / truth[0], rel=0.15)
        assert curve.seconds == pytest.approx(3 * TICK * truth, rel=0.25)


@given(st.lists(st.tuples(st.integers(1, 400), st.floats(-1, 1e3)), max_size=40), st.sampled_from([1, 3, 64, 256]))
def test_curve_is_monotonic(told, sizes):
    curve = OnlineCurve(np.linspace(1, 3, sizes))
    for nodes, seconds in told:
        curve.record_time(nodes, seconds)
    assert len(curve.relative) == sizes
    assert curve.relative[0] == 1
    assert (np.diff(curve.relative) >= 0).all()
    assert np.isfinite(curve.seconds).all()
