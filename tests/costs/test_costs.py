"""What steps cost: of texts that share passes, come and go, and grow."""

import numpy as np
import pytest

from token_recycling.costs.costs import Costs, OnlineCurve, band, shared_by

pytestmark = pytest.mark.measured

TIMES = np.array([1.0, 1.5, 2.25, 3.0, 4.5, 6.0])


def curves():
    """One for each number of texts and band of length, as asked for."""
    known = {}

    def curve_of(sequences, length):
        return known.setdefault((sequences, band(length)), OnlineCurve(shared_by(sequences, TIMES)))

    return curve_of


def test_texts_share_passes_and_come_and_go():
    """Of 2 texts a pass has 2, 4, 6 rows; of 4 it has 4, and 8 are not known."""
    assert shared_by(4, TIMES).tolist() == [3.0]
    assert shared_by(8, TIMES).tolist() == shared_by(100, TIMES).tolist() == [6.0]
    costs = Costs(curves(), sequences=2, length=10)
    assert [costs.of(nodes) for nodes in (1, 3, 9)] == [1, 4, 4]
    assert costs.in_passes(0.75) == 1
    for sequences, wanted in ((2, [1, 2, 4]), (1, TIMES.tolist()), (6, [1])):
        costs.share(sequences, 10)
        assert costs.by_nodes.tolist() == wanted


def test_costs_follow_what_steps_take():
    """Passes take twice as long as expected, then as long; three nodes cost as two."""
    costs = Costs(curves(), sequences=2, length=10)
    costs.took(2, 100.0, 10)  # nobody has asked yet
    assert not costs.asked
    assert costs.by_nodes.tolist() == [1, 2, 4]
    assert costs.asked
    for factor in (2, 1):
        for nodes in (1, 2, 3, 4) * 100:  # a drafter may give more nodes than there are times for
            costs.took(nodes, factor * 1.5 * [1, 2, 2, 2][nodes - 1], 10)
        assert costs.in_passes(0.75) == pytest.approx(1 / factor, rel=0.05)
        assert costs.by_nodes == pytest.approx([1, 2, 2], rel=0.1)


def test_what_is_learned_of_longer_texts_does_not_change_the_shorter_ones():
    known = curves()
    costs = Costs(known, 1, 250)
    assert costs.of(6) == 6
    for _ in range(100):
        costs.took(1, 1.0, 300)
        costs.took(6, 20.0, 300)
    assert costs.of(6) > 10
    assert Costs(known, 1, 256).of(6) == 6
    assert Costs(known, 1, 1000).of(6) == costs.of(6)


def test_processes_agree_on_every_time():
    costs = Costs(curves(), 1, 10, agreed=lambda seconds: 2 * seconds)
    assert costs.in_passes(0.5) == 1.0
    for _ in range(50):
        costs.took(1, 1.0, 10)
    assert costs.in_passes(0.5) == pytest.approx(0.5, rel=0.1)
