"""Drafting overhead, back-off and forecast ratio."""

import numpy as np
import pytest
import torch

import token_recycling as tr
from token_recycling.costs import OnlineCurve
from token_recycling.drafters._base import SequenceDrafter
from token_recycling.loop import pacer as pacing
from token_recycling.loop.pacer import Ledger, Overhead, Pace, Pacer
from token_recycling.trees.draft import Draft, Step

pytestmark = pytest.mark.measured


def new_pacer():
    return Pacer(lambda sequences, length: OnlineCurve(np.linspace(1, 3, 8)))


def pace_of(pacer, drafter=None, rate=None, monkeypatch=None):
    """Return the pace of a new sequence that drafts; until anything is learned, its steps give `rate` tokens."""
    if rate is not None:
        monkeypatch.setattr(pacing, "_PRIOR_RATE", rate)
    pace = Pace(SequenceDrafter(tr.make_drafter("plain") if drafter is None else drafter), "auto")
    pacer.budget(pace, within=False)
    return pace


def test_overhead_is_estimated_per_step_and_per_node():
    overhead, chance = Overhead(), np.random.default_rng(0)
    for nodes in chance.integers(1, 65, 600):
        overhead.count(int(nodes), (0.05 + 0.002 * (nodes - 1)) * chance.uniform(0.8, 1.2))
    assert overhead.step == pytest.approx(0.05, rel=0.1)
    assert overhead.node == pytest.approx(0.002, rel=0.1)
    assert overhead.of(1) == overhead.step
    assert overhead.of(11) == pytest.approx(0.07, rel=0.05)


def test_outlier_counts_as_at_most_three_times_the_estimate():
    """The first step too: a drafter that seemed slow would be disabled."""
    overhead = Overhead()
    overhead.count(1, 100.0)
    assert overhead.step < 0.05
    for _ in range(100):
        overhead.count(1, 0.1)
    before = overhead.step
    overhead.count(1, 100.0)
    assert overhead.step < 1.03 * before


@pytest.mark.parametrize(("own", "steps"), [(0.2, 20), (5.0, 64), (0.001, 0)])
def test_pause_limits_probes_to_one_percent_of_the_time(monkeypatch, own, steps):
    assert pace_of(new_pacer(), None, 0.9, monkeypatch).account.back_off(1, 1.5, own) == steps


def test_no_pause_if_drafting_pays_on_average_or_in_this_step(monkeypatch):
    def paused(rate, **step):
        return pace_of(new_pacer(), None, rate, monkeypatch).account.back_off(1, 1.5, 0.5, **step)

    assert paused(2.0) == 0
    assert paused(0.9, predicted=1.9) == 0
    assert paused(0.9, predicted=1.6) > 0, "such forecasts are too high by a third"


def test_no_pause_while_the_batch_as_a_whole_gains(monkeypatch):
    """The other sequence gains as much as this one loses; then it no longer does."""
    pace = pace_of(new_pacer(), None, 1.1, monkeypatch)
    for _ in range(20):
        pace.account.back_off(1, 2.0, 0.5)
        pace.account.back_off(4, 2.0, 0.5)
    assert pace.account.back_off(1, 2.0, 0.5) == 0
    for _ in range(80):
        pace.account.back_off(2, 2.0, 0.5)
        pace.account.back_off(1, 2.0, 0.5)
    assert pace.account.back_off(1, 2.0, 0.5) > 0


def test_forecast_ratio_is_learned_and_kept_for_later_sequences():
    """Sequences within grammars have a separate ratio."""
    drafter, pacer = tr.make_drafter("plain"), new_pacer()
    pace = pace_of(pacer, drafter)
    assert pacer.budget(pace, within=False).ratio == pytest.approx(0.7)
    for _ in range(300):
        pace.account.back_off(2, 1.0, 0.1, predicted=3.0)
    assert pacer.budget(pace, within=False).ratio == pytest.approx(0.5, abs=0.02)
    assert new_pacer().budget(pace_of(new_pacer(), drafter), within=False).ratio == pytest.approx(0.5, abs=0.02)
    assert pacer.budget(pace, within=True).ratio == pytest.approx(0.7)
    pacer.budget(pace, within=False)
    for _ in range(300):
        pace.account.back_off(5, 1.0, 0.1, predicted=3.0)
    assert pacer.budget(pace, within=False).ratio == 1, "the ratio is at most one"


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("runs_model", [True, False])
def test_drafts_that_never_pay_are_timed_and_probed_one_percent_of_the_time(runs_model, sequences):
    """For every sequence, either a draft or each forward pass of a draft takes 0.1."""
    pacer = new_pacer()
    pacer.share([10] * sequences)
    pace = Pace(SequenceDrafter(tr.make_drafter("plain")), "auto")
    pace.drafter.pass_cost = Overhead().step / sequences if runs_model else None
    step = Step(Draft.chain([1]), torch.zeros(1, 4), [0], [1], finished=False)
    for number in range(200):
        budget = pacer.budget(pace, within=False)
        assert budget is not None
        overhead, budget.passes = pace.account.overhead, 1 + number % 4
        units = budget.passes if runs_model else 1
        pace.seconds = 0.03 * units
        pacer.count(pace, step, 0.07 * units)
        assert number or overhead.step == Overhead().step, "the first draft also reads the prompt"
        rest = pace.paused
        assert [pacer.budget(pace, within=False) for _ in range(rest)] == [None] * rest
        if number > 100:
            assert overhead.step == pytest.approx(0.1 * sequences, rel=0.1), "the prior counts as four steps"
            assert rest == pytest.approx(min(64, 10 * units * sequences), rel=0.1, abs=1)


def test_drafters_of_fixed_size_are_neither_timed_nor_paused():
    pacer = new_pacer()
    for nodes, most in ((5, 5), (None, 4096)):
        pace = Pace(SequenceDrafter(tr.make_drafter("plain")), nodes)
        assert pacer.budget(pace, within=False).nodes == most
        assert pace.account is None
        assert pacer.budget(pace, within=False).pays([1.0])


def test_fork_copies_the_ledger():
    drafter = tr.make_drafter("recycling")
    ledger = Ledger.of(drafter)
    ledger.sums = np.array([9.0, 3.0, 2.0, 4.0])
    fork = Ledger.of(drafter.fork())
    assert fork.sums.tolist() == [9.0, 3.0, 2.0, 4.0]
    assert fork is not ledger
    assert Ledger.of(tr.make_drafter("recycling")).sums.tolist() != fork.sums.tolist()
