"""Which size pays, worked by hand on made-up curves; where curves are measured, saved and found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from token_recycling import Stats, make_drafter
from token_recycling.costs.curve import CostCurve
from token_recycling.costs.tune import (
    best_size,
    expected_tokens,
    one_more,
    passes_cost,
    rank_acceptance,
    shared_chances,
    template,
)
from token_recycling.model import pass_costs as measuring
from token_recycling.model.cost_store import load
from token_recycling.model.pass_costs import PassCosts, measure, with_room
from token_recycling.model.tree_model import TreeModel
from token_recycling.trees.templates import chain, paper, parse_paths, written

FLAT = CostCurve(256, (1, 4), (1.0, 1.0))
STEEP = CostCurve(256, (1, 2, 4), (1.0, 1.25, 2.25))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))


def curve(length, seconds=1.0):
    return CostCurve(length, (1, 2), (seconds, 2 * seconds))


def test_expected_tokens_of_a_chain_and_of_a_tree():
    assert expected_tokens([0.5], 3) == pytest.approx([1, 1.5, 1.75, 1.875])
    # Best first: 0 with 0.6, 00 with 0.36, 1 with 0.3, 000 with 0.216.
    assert expected_tokens([0.6, 0.3], 4) == pytest.approx([1, 1.6, 1.96, 2.26, 2.476])
    assert expected_tokens([0.5], 0) == pytest.approx([1])


def test_a_chain_gains_nothing_beyond_the_greatest_depth():
    tokens = expected_tokens([1.0], 70)
    assert (tokens[64], tokens[70]) == (65, 65)


def test_the_best_size_has_the_most_tokens_per_time():
    # 1 / 1, 1.5 / 1.25, 1.75 / 1.75, 1.875 / 2.25: one node is best.
    size = best_size(STEEP, [0.5])
    assert (size.nodes, size.tokens, size.cost, size.times_plain) == pytest.approx((1, 1.5, 1.25, 1.2))
    # 1 / 1, 1.9 / 1.25, 2.71 / 1.75, 3.439 / 2.25: two nodes, by a little.
    assert best_size(STEEP, [0.9]).nodes == 2
    assert best_size(FLAT, [0.5]).nodes == 3


def test_no_node_pays_where_hardly_any_candidate_is_right():
    size = best_size(STEEP, [0.2])
    assert (size.nodes, size.times_plain) == (0, 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.lists(st.floats(0.1, 10), min_size=6, max_size=6))
def test_no_other_size_is_better(acceptance, seconds):
    made = CostCurve(256, tuple(range(1, 7)), tuple(seconds))
    rates = expected_tokens(acceptance, 5) / made.relative()
    assert best_size(made, acceptance).times_plain == pytest.approx(max(rates))


def test_what_one_more_node_costs():
    assert one_more(STEEP) == [None, pytest.approx(0.25), pytest.approx(0.5)]


def test_each_candidate_has_its_chance_of_what_is_left():
    assert shared_chances(0.5, 3) == pytest.approx([0.5, 0.25, 0.125])


def test_the_cost_of_a_run_is_that_of_its_passes():
    stats = Stats(nodes={1: 2, 2: 1, 4: 3})
    assert passes_cost(STEEP, stats.nodes) == pytest.approx(2 + 1.25 + 3 * 2.25)


def test_ranks_that_were_never_tried_have_no_acceptance():
    stats = Stats()
    stats.tried.update({(1, 0): 4, (2, 0): 4, (1, 2): 10})
    stats.accepted.update({(1, 0): 3, (2, 0): 1, (1, 2): 2})
    assert rank_acceptance(stats.acceptance_by_rank) == [0.5, 0, 0.2]
    with pytest.raises(ValueError, match="expected drafted tokens"):
        rank_acceptance(Stats().acceptance_by_rank)


@pytest.mark.parametrize("tree", [paper(), chain(3), parse_paths("12. 0 0.11 12.3 1"), template([0.6, 0.3], 9)])
def test_a_written_template_is_read_again(tree, tmp_path):
    file = tmp_path / "grown.txt"
    file.write_text(written(tree))
    read = make_drafter("published", tree=str(file), k=16).template
    assert (read.parents, read.ranks) == (tree.parents, tree.ranks)


def test_lengths_are_bands_within_the_context():
    target = TreeModel(tiny.llama(max_position_embeddings=4096))
    assert PassCosts(target).lengths(1) == [256]
    assert PassCosts(target).lengths(257) == [256, 1024]
    assert PassCosts(target).lengths(1024) == [256, 1024]
    assert PassCosts(target).lengths(4096) == [256, 1024, 4032]
    assert PassCosts(TreeModel(tiny.llama(max_position_embeddings=96))).lengths(96) == [32]


@pytest.mark.parametrize("context", [96, 512])
def test_saved_curves_are_found_at_every_length(context, monkeypatch):
    target = TreeModel(tiny.llama(max_position_embeddings=context))
    saved = [curve(length) for length in PassCosts(target).lengths(context)]
    PassCosts(target).keep(saved)
    monkeypatch.setattr(measuring, "measure", lambda *_: pytest.fail("measured again"))
    found = [PassCosts(target).curve(length) for length in (1, context // 2, context)]
    assert found[0] == saved[0]
    assert found[-1] == saved[-1]


def test_a_saved_curve_replaces_one_that_was_measured_on_the_way():
    target = TreeModel(tiny.llama())
    PassCosts(target).keep([curve(256)])
    assert PassCosts(target).curve(100).seconds == (1, 2)
    PassCosts(target).keep([curve(256, 3.0)])
    assert PassCosts(target).curve(100).seconds == (3, 6)


def test_curves_of_other_lengths_are_kept():
    target = TreeModel(tiny.llama())
    PassCosts(target).keep([curve(448), curve(256)])
    PassCosts(target).keep([curve(256, 3.0)])
    assert load(target) == [curve(256, 3.0), curve(448)]


def test_measured_lengths_leave_room_for_the_largest_tree():
    target = TreeModel(tiny.llama(max_position_embeddings=96))
    found = measure(target, 256, sizes=(1, 8), seconds=0)
    assert (found.length, found.sizes) == (88, (1, 8))
    assert with_room(target, 256) == 32
    assert np.isfinite(found.relative()).all()
