"""How often candidates of a kind are chosen: the counts, what they fade to, and what they change."""

import numpy as np
import pytest
from support.matrices import Grower, close, matrix_of

from token_recycling.recycling.calibration import (
    MATCHES,
    calibrated,
    cell_of,
    count,
    new_calibration,
)
from token_recycling.recycling.growth import count_chosen
from token_recycling.recycling.mixture import mixture_calibration


def test_observations_outweigh_the_prior_of_four():
    calibration = new_calibration()
    for chosen in (True, True, False, True):
        count(calibration, 7, chosen)
    assert calibration[7].tolist() == [3, 4]
    assert calibrated(calibration, 7, 0.25) == pytest.approx((3 + 0.25 * 4) / (4 + 4))
    for _ in range(996):
        count(calibration, 7, True)
    assert calibrated(calibration, 7, 0.25) == pytest.approx(0.996, abs=1e-3)
    assert calibration.sum() == 1999, "no other kind is touched"


def test_old_observations_fade():
    """Past 2,000 both counts are halved: 2,001 of which all were chosen, then none for 1,000."""
    calibration = new_calibration()
    for _ in range(2001):
        count(calibration, 7, True)
    assert calibration[7].tolist() == [1000.5, 1000.5]
    for _ in range(999):
        count(calibration, 7, False)
    assert calibration[7].tolist() == [1000.5, 1999.5]
    count(calibration, 7, False)
    assert calibration[7].tolist() == [500.25, 1000.25]


def unsupported(share, rank):
    """The kind of a candidate of a mixture that no text supports, neither this one nor the past."""
    return cell_of(np.float32(share), rank, 0, kinds=4 * MATCHES + 7)


def test_candidates_are_counted_at_accepted_nodes_drafted_or_not():
    """Root 5 and its child 10 are accepted, and 21 follows; only 10 and 20 were drafted. The sibling 11 is no node of
    the text: what may follow it is not counted. But it stood beside 10, and so is a candidate after it.
    """
    rows = {(5,): {10: 0.5, 11: 0.3}, (10,): {20: 0.6, 21: 0.2}, (11,): {30: 0.9}}
    grower = Grower(matrix_of(rows), [5])
    assert grower.paths(grower.fill("0 1 00")) == [(10,), (11,), (10, 20)]
    calibration = grower.matrix.calibration
    count_chosen(grower.growing, 4, np.array([10, 21]), grower.matrix.calibration)
    kinds = [(10, 0.4, 0), (11, 0.24, 1), (20, 0.48, 0), (21, 0.16, 1), (11, 0.006, 2)]
    wanted = mixture_calibration()
    for token, share, rank in kinds:
        wanted[unsupported(share, rank)] += [token in (10, 21), 1]
    assert wanted[:, 1].sum() == 5
    np.testing.assert_array_equal(calibration, wanted)


def test_calibration_changes_what_grows():
    """Candidate 11 looks worse, but its kind has always been right: it comes first."""
    matrix = matrix_of({(5,): {10: 0.6, 11: 0.35}})
    grower = Grower(matrix, [5])
    assert grower.paths(grower.grow(2, depth=1)) == [(10,), (11,)]
    for _ in range(50):
        count(matrix.calibration, unsupported(0.8 * 0.6, 0), False)
        count(matrix.calibration, unsupported(0.8 * 0.35, 1), True)
    assert grower.paths(grower.grow(2, depth=1)) == [(11,), (10,)]
    close(grower.children(), {11: (50 + 0.28 * 4) / 54, 10: 0.48 * 4 / 54})
