"""Candidates at a position: weights of each source computed by hand, and invariants of every mixture."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.matrices import Grower, close, learn, matrix_of

from token_recycling.recycling.calibration import MATCHES, calibrated, cell_of, count, new_calibration
from token_recycling.recycling.mixture import mixture_calibration
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.recycling.suffix_index import BREAK


def candidates_after(matrix, text, suffix=False):
    """Return the candidates after a text, most probable first."""
    grower = Grower(matrix, text, suffix)
    grower.grow(1)
    return grower.children()


def sorted_by_value(wanted):
    return dict(sorted(wanted.items(), key=lambda item: -item[1]))


def matrix_with_history(history, rows, **sizes):
    matrix = matrix_of(rows, history=256, **sizes)
    matrix.history.extend(history)
    return matrix


# Occurrences


@pytest.mark.parametrize("in_history", [True, False], ids=["history", "this sequence"])
@pytest.mark.parametrize(
    ("repeated", "here", "past"), [(1, 0.1, 0.1), (3, 0.25, 0.25), (5, 0.5, 0.5), (16, 0.8, 0.8), (32, 0.8, 0.95)]
)
def test_weight_of_occurrences_grows_with_match_length(repeated, here, past, in_history):
    weight = past if in_history else here
    again = list(range(20, 20 + repeated))
    history = [*again, 7, BREAK] if in_history else []
    matrix = matrix_with_history(history, {(again[-1],): {10: 0.5}}, vocab_size=60)
    text = again if in_history else [*again, 7, 8, *again]
    close(candidates_after(matrix, text, suffix=not in_history), sorted_by_value({10: 0.4 * (1 - weight), 7: weight}))
    if not in_history:
        close(candidates_after(matrix, text), {10: 0.4})


def test_own_occurrences_are_interpolated_with_the_history():
    """Three tokens match in the history, one in this sequence."""
    matrix = matrix_with_history([1, 2, 3, 7], {(3,): {10: 0.5}})
    text = [3, 8, 1, 2, 3]
    close(candidates_after(matrix, text, suffix=True), sorted_by_value({10: 0.4 * 0.75 * 0.9, 7: 0.25 * 0.9, 8: 0.1}))
    close(candidates_after(matrix, text), sorted_by_value({10: 0.4 * 0.75, 7: 0.25}))


def test_longer_matches_weigh_more_and_the_longest_sets_the_total_weight():
    """Three matches of one token, one of two and one of three: weights 1, 1, 1, 4 and 10 of 17."""
    history = [30, 3, 7, 31, 3, 7, 32, 3, 8, 33, 2, 3, 8, 34, 1, 2, 3, 9]
    matrix = matrix_with_history(history, {(39,): {10: 0.5}})
    close(candidates_after(matrix, [1, 2, 3]), {9: 0.25 * 10 / 17, 8: 0.25 * 5 / 17, 7: 0.25 * 2 / 17})


def test_candidates_of_the_previous_position_are_candidates():
    """From the longest context, without the newest token; they stand alone if there are no others."""
    matrix = matrix_of({(4, 5): {11: 0.5, 12: 0.25}, (5,): {10: 0.5, 13: 0.25}}, orders=2)
    close(candidates_after(matrix, [4, 5, 39]), {11: 0.05, 12: 0.025})
    close(candidates_after(matrix, [3, 5, 39]), {10: 0.05, 13: 0.025})
    close(candidates_after(matrix, [3, 5, 13]), {10: 0.05})
    assert candidates_after(matrix, [5, 39, 38]) == {}


# Calibration


def cell(share, rank, text=0, history=0):
    """Return the calibration cell of a candidate; by default neither this sequence nor the history supports it."""
    return cell_of(np.float32(share), rank, text * 5 + history, 5 * MATCHES + 7)


def test_observations_outweigh_a_prior_of_weight_four():
    calibration = new_calibration()
    for chosen in (True, True, False, True):
        count(calibration, 7, chosen)
    assert calibration[7].tolist() == [3, 4]
    assert calibrated(calibration, 7, 0.25) == pytest.approx((3 + 0.25 * 4) / (4 + 4))
    for _ in range(996):
        count(calibration, 7, True)
    assert calibrated(calibration, 7, 0.25) == pytest.approx(0.996, abs=1e-3)
    assert calibration.sum() == 1999, "no other cell changes"


def test_old_observations_fade():
    """Beyond 2,000 both counts are halved: 2,001 observations all chosen, then none of 1,000."""
    calibration = new_calibration()
    for _ in range(2001):
        count(calibration, 7, True)
    assert calibration[7].tolist() == [1000.5, 1000.5]
    for _ in range(999):
        count(calibration, 7, False)
    assert calibration[7].tolist() == [1000.5, 1999.5]
    count(calibration, 7, False)
    assert calibration[7].tolist() == [500.25, 1000.25]


def test_candidates_at_accepted_nodes_are_counted_drafted_or_not():
    """Root 5 and its child 10 are accepted, and 21 follows; only 10 and 20 were drafted. The sibling 11 is rejected, so
    candidates after it are not counted. But 11 was a candidate next to 10, and so it is a candidate after 10.
    """
    rows = {(5,): {10: 0.5, 11: 0.3}, (10,): {20: 0.6, 21: 0.2}, (11,): {30: 0.9}}
    grower = Grower(matrix_of(rows), [5])
    assert grower.paths(grower.fill("0 1 00")) == [(10,), (11,), (10, 20)]
    calibration = grower.matrix.calibration
    grower.count([10, 21])
    kinds = [(10, 0.4, 0), (11, 0.24, 1), (20, 0.48, 0), (21, 0.16, 1), (11, 0.006, 2)]
    wanted = mixture_calibration()
    for token, share, rank in kinds:
        wanted[cell(share, rank)] += [token in (10, 21), 1]
    assert wanted[:, 1].sum() == 5
    np.testing.assert_array_equal(calibration, wanted)


def test_calibration_changes_what_grows():
    """Candidate 11 has a lower probability, but its cell was always accepted: it comes first."""
    matrix = matrix_of({(5,): {10: 0.6, 11: 0.35}})
    grower = Grower(matrix, [5])
    assert grower.paths(grower.grow(2, depth=1)) == [(10,), (11,)]
    for _ in range(50):
        count(matrix.calibration, cell(0.8 * 0.6, 0), False)
        count(matrix.calibration, cell(0.8 * 0.35, 1), True)
    assert grower.paths(grower.grow(2, depth=1)) == [(11,), (10,)]
    close(grower.children(), {11: (50 + 0.28 * 4) / 54, 10: 0.48 * 4 / 54})


@pytest.mark.parametrize(("repeated", "kind"), [(1, 1), (3, 2), (8, 3), (31, 3), (32, 4)])
def test_candidates_supported_by_the_history_have_their_own_cells(repeated, kind):
    again = list(range(20, 20 + repeated))
    matrix = matrix_with_history([*again, 7], {(0,): {10: 0.5}})
    grower = Grower(matrix, again)
    grower.grow(1)
    share = grower.children()[7]
    grower.count([7])
    wanted = mixture_calibration()
    wanted[cell(share, 0, history=kind)] = [1, 1]
    np.testing.assert_array_equal(matrix.calibration, wanted)


# Invariants

TOKENS = st.integers(0, 5)
TEXTS = st.lists(TOKENS, min_size=1, max_size=40)


@given(TEXTS, TEXTS, st.integers(1, 4), st.integers(0, 1000))
def test_candidates_are_distinct_and_probabilities_are_at_most_one(history, text, orders, seed):
    """Uncalibrated probabilities sum to one at most; each calibrated one is at most one."""
    generator = np.random.default_rng(seed)
    matrix = NgramMatrix(6, k=3, orders=orders, memory=0.01, history=64)
    matrix.history.extend(history)
    for end in range(1, len(history), 2):
        shares = np.sort(generator.dirichlet(np.ones(6)))[::-1][:3]
        row = dict(zip(generator.permutation(6)[:3].tolist(), shares.tolist(), strict=True))
        learn(matrix, (history[:end], row))
    grower = Grower(matrix, text, suffix=True)
    nodes = grower.grow(6, depth=3)
    assert sum(grower.children().values()) <= 1 + 1e-4
    for node in range(nodes):
        known = grower.growing["count"][node]
        assert len(grower.children(node)) == known, "every token once"
        likely = grower.growing["probabilities"][node, :known]
        assert (likely >= 0).all()
        assert (likely <= 1 + 1e-5).all()
        assert (np.diff(likely) <= 0).all(), "most probable first"
    for _ in range(5):
        grower.count(grower.growing["token"][1:nodes])
    grower.grow(6, depth=3)
    assert all(0 <= one <= 1 + 1e-5 for one in grower.children().values())
