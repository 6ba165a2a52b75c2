"""Costs of steps of sequences that share forward passes, join, leave and grow."""

import numpy as np
import pytest

from token_recycling.costs import OnlineCurve
from token_recycling.loop.pacer import Pacer
from token_recycling.model.pass_times import band, shared_by

pytestmark = pytest.mark.measured

TIMES = np.array([1.0, 1.5, 2.25, 3.0, 4.5, 6.0])


def curves():
    """Return a function that makes one curve for each number of sequences and length bucket."""
    known = {}

    def curve_of(sequences, length):
        return known.setdefault((sequences, band(length)), OnlineCurve(shared_by(sequences, TIMES)))

    return curve_of


def pacer_of(curve_of, sequences, length, **options):
    """Return a pacer of `sequences` sequences, the longest of `length` tokens."""
    pacer = Pacer(curve_of, **options)
    pacer.share([length] * sequences)
    return pacer


def test_curve_follows_the_number_of_sequences():
    """With 2 sequences a forward pass has 2, 4 or 6 rows; with 4 it has 4, and the time of 8 is unknown."""
    assert shared_by(4, TIMES).tolist() == [3.0]
    assert shared_by(8, TIMES).tolist() == shared_by(100, TIMES).tolist() == [6.0]
    pacer = pacer_of(curves(), 2, 10)
    assert [pacer.time_of(nodes) for nodes in (1, 3, 9)] == [1, 4, 4]
    for sequences, wanted in ((2, [1, 2, 4]), (1, TIMES.tolist()), (6, [1])):
        pacer.share([10] * sequences)
        assert pacer.curve.relative.tolist() == wanted


def test_costs_follow_measured_times():
    """Forward passes take twice the expected time, then the expected time; three nodes cost as much as two."""
    pacer = pacer_of(curves(), 2, 10)
    pacer.record_time(2, 100.0)  # not counted: no draft is sized by cost yet
    assert pacer.curve.relative.tolist() == [1, 2, 4]
    for factor in (2, 1):
        for nodes in (1, 2, 3, 4) * 100:  # a draft may have more nodes than the curve
            pacer.record_time(nodes, factor * 1.5 * [1, 2, 2, 2][nodes - 1])
        assert pacer.curve.seconds[0] == pytest.approx(1.5 * factor, rel=0.05)
        assert pacer.curve.relative == pytest.approx([1, 2, 2], rel=0.1)


def test_forward_pass_with_a_prompt_is_not_counted():
    pacer = pacer_of(curves(), 1, 10)
    before = pacer.curve.seconds.tolist()
    for _ in range(50):
        pacer.record_time(3, 0.0)
    assert pacer.curve.seconds.tolist() == before


def test_length_buckets_have_separate_curves():
    known = curves()
    pacer = pacer_of(known, 1, 250)
    assert pacer.time_of(6) == 6
    pacer.share([300])
    for _ in range(100):
        pacer.record_time(1, 1.0)
        pacer.record_time(6, 20.0)
    assert pacer.time_of(6) > 10
    assert pacer_of(known, 1, 256).time_of(6) == 6
    assert pacer_of(known, 1, 1000).time_of(6) == pacer.time_of(6)


def test_times_are_agreed_between_processes():
    pacer = Pacer(curves(), agreed=lambda seconds: 2 * seconds)
    assert pacer.curve.seconds[0] == 1.0
    for _ in range(50):
        pacer.record_time(1, 1.0)
    assert pacer.curve.seconds[0] == pytest.approx(2.0, rel=0.1)
