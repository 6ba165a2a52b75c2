"""Drafts made one: merged by hand, weighed by hand, the best nodes against a search, drawn ones exact."""

import dataclasses
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.cases import thinned
from support.languages import LINE, TWO_LEVELS, P, drafted, fits, texts
from support.runs import paths_of
from support.strategies import drafts

from token_recycling import Draft
from token_recycling.drafters.fuse import merge as fusing
from token_recycling.drafters.fuse.merge import FuseCalibration, Merged, fixed_nodes, merge_drafts, valued_draft
from token_recycling.loop.accept import accept_walk
from token_recycling.loop.pacer import prune
from token_recycling.trees.templates import parse_paths

ROOT = 5
ROOT_NODE = frozenset({0})


def draft(paths, tokens, probabilities=None, **more):
    stated = None if probabilities is None else [1, *probabilities]
    return Draft([ROOT, *tokens], parse_paths(paths).parents, stated, **more)  # type: ignore[arg-type]


def paths(tree_of):
    """The tokens from the root down to every node but the root."""
    return paths_of(tree_of.draft if isinstance(tree_of, Merged) else tree_of)[1:]


def chosen_of(merged, values, most, first=ROOT_NODE, drawn=frozenset()):
    """The draft of the best nodes of a merged one."""
    return valued_draft(merged, np.array(values), drawn, first).first_ranked(1 + most)


# Two small drafts: 7 and 8 after the root, 9 after 7; and 8, then 6 and 9 after it.
ONE = draft("0 1 00", [7, 8, 9], [0.6, 0.2, 0.5])
TWO = draft("0 00 01", [8, 6, 9], [0.5, 0.7, 0.1])


# Merging


def test_two_drafts_are_merged_by_hand():
    merged = merge_drafts([ONE, TWO])
    assert paths(merged) == [(7,), (8,), (7, 9), (8, 6), (8, 9)]
    assert merged.draft.tokens[0] == ROOT
    assert merged.draft.depths.tolist() == [0, 1, 1, 2, 2, 2]
    assert merged.ranks.tolist() == [[0, 0], [0, -1], [1, 0], [0, -1], [-1, 0], [-1, 1]]
    assert merged.confidences[1:].tolist() == pytest.approx(
        np.array([[0.6, 0], [0.2, 0.5], [0.5, 0], [0, 0.7], [0, 0.1]])
    )


@given(st.lists(drafts(), min_size=2, max_size=4), st.integers(0, 20), st.integers(0, 10**6))
def test_what_is_verified_was_proposed_and_is_a_tree(proposed, most, seed):
    for one in proposed:
        one.tokens[0] = ROOT
    merged = merge_drafts(proposed)
    every = set().union(*(paths(one) for one in proposed))
    assert len(paths(merged)) == len(every)
    assert set(paths(merged)) == every
    for part, one in enumerate(proposed):
        own = {path for path, rank in zip(paths(merged), merged.ranks[1:, part], strict=True) if rank >= 0}
        assert own == set(paths(one))
    calibration = FuseCalibration.empty(len(proposed))
    draws = np.random.default_rng(seed)
    for _ in range(5):
        calibration.learn(merged, calibration.values_of(merged), draws.integers(0, 4, 5).tolist())
    values = calibration.values_of(merged).values
    fused = chosen_of(merged, values, most)
    kept = fused.places_in(merged.draft)
    assert fused.values == pytest.approx(values[kept], abs=1e-6)
    assert len(fused) == min(most, len(every)) + 1
    assert set(paths(fused)) <= every
    assert [fused.children[node] for node in range(len(kept))] == [
        tuple(np.flatnonzero(np.array(fused.parents) == node)) for node in range(len(kept))
    ]
    left = np.setdiff1d(np.arange(len(values)), kept)
    assert not len(left) or values[left].max() <= values[kept].min() + 1e-6
    assert values.max() <= 1 + 1e-6


# Weighing


def test_siblings_share_what_is_certain():
    sure = draft("0 1 00", [7, 8, 9], [0.9, 0.9, 1.0])
    merged = merge_drafts([sure, Draft.chain([ROOT])])
    assert FuseCalibration.empty(2).values_of(merged).values.tolist() == pytest.approx([1, 0.5, 0.5, 0.5])


def test_who_is_right_is_learned():
    """One is sure and always wrong, two is unsure and always right: the order turns."""
    merged = merge_drafts([draft("0", [7], [0.9]), draft("0", [8], [0.2])])
    calibration = FuseCalibration.empty(2)
    assert paths(chosen_of(merged, calibration.values_of(merged).values, 1)) == [(7,)]
    for _ in range(20):
        calibration.learn(merged, calibration.values_of(merged), [8, 3])
    values = calibration.values_of(merged).values
    assert paths(chosen_of(merged, values, 1)) == [(8,)]
    assert values[1] < 0.1
    assert values[2] > 0.8


# Choosing


def test_as_many_are_kept_as_pay():
    star = Draft.of(range(5), [-1, 0, 0, 0, 0], [1, 0.9, 0.8, 0.1, 0.05])
    flat, steep = np.array([1.0, 1.05, 1.1, 1.15, 1.2]), np.array([1.0, 3, 5, 7, 9])

    def kept(times, needed=frozenset(), ratio=1.0):
        return prune([dataclasses.replace(star, needed=needed)], times, [ratio])[0].tokens.tolist()

    assert kept(flat) == [0, 1, 2]
    assert kept(steep) == [0]
    # Where drafting has taken ten times a pass already, a pass should bring what it can.
    assert kept(flat + 10.0) == [0, 1, 2, 3, 4]
    # What must be kept is, whether it pays or not.
    assert kept(np.array([1.0, 2, 20, 40, 60]), frozenset({4})) == [0, 4]
    # Where a tenth of what was predicted came true, nothing pays.
    assert kept(flat, ratio=0.01) == [0]


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=7), st.integers(0, 10**6), st.integers(0, 7))
def test_the_tree_kept_is_the_best_of_its_size(shares, seed, most):
    draws = np.random.default_rng(seed)
    parents = [-1]
    for _ in shares:
        parents.append(int(draws.integers(0, len(parents))))
    whole = Draft.of(range(len(parents)), parents, [1, *shares])
    kept = whole.first_ranked(1 + most)
    above, values = whole.parents.tolist(), whole.values
    closed = [
        sum(values[node] for node in nodes)
        for nodes in combinations(range(1, len(values)), len(kept) - 1)
        if all(above[node] in (0, *nodes) for node in nodes)
    ]
    assert kept.values[1:].sum() == pytest.approx(max(closed))


def test_drafts_without_probabilities_and_sampled_ones_stay_whole():
    """The others have as many nodes as the largest of these, at least."""
    sure = Draft.of(range(4), [-1, 0, 1, 2], [1, 0.9, 0.9, 0.9])
    silent = Draft.of(range(3), [-1, 0, 0])
    sampled = Draft.of(range(2), [-1, 0], [1, 0.1], sampled_from={1: torch.full((9,), 1 / 9)})
    dear = np.array([1.0, 9, 99, 999])
    assert [len(one) for one in prune([sure, silent, sampled], dear, [1.0] * 3)] == [3, 3, 2]
    assert [len(one) for one in prune([sure, sampled], dear, [1.0] * 2)] == [2, 2]
    assert [len(one) for one in prune([sure], dear, [1.0])] == [1]


# What was drawn


def test_drawn_nodes_stay_in_their_order_before_others():
    """8 then 7 were drawn; the other draft comes first and says 7 and 9."""
    q = torch.full((10,), 0.1)
    drawn = draft("0 1 00", [8, 7, 9], sampled_from={1: q, 2: q, 3: q})
    merged = merge_drafts([draft("0 1", [7, 9], [0.9, 0.05]), drawn])
    assert paths(merged) == [(8,), (7,), (9,), (8, 9)]
    first, still_drawn = fixed_nodes(merged, 4)
    assert (first, still_drawn) == ({0, 1, 2, 4}, {1, 2, 4})
    values = np.array([1, 0.1, 0.1, 0.05, 0.01])
    fused = chosen_of(merged, values, 4, first, still_drawn)
    assert paths(fused) == paths(merged)
    assert sorted(fused.sampled_from) == [1, 2, 4]
    # With room for three the second layer counts as chosen, and loses by its value.
    first, still_drawn = fixed_nodes(merged, 2)
    assert (first, still_drawn) == ({0, 1, 2}, {1, 2})
    assert fixed_nodes(merged, 1) == ({0}, frozenset())
    # What a drafter needs is kept too, if all of it fits.
    merged = merge_drafts([ONE, dataclasses.replace(TWO, needed=frozenset({2, 3}))])
    assert fixed_nodes(merged, 3) == (frozenset({0, 2, 4, 5}), frozenset())
    assert fixed_nodes(merged, 2) == (frozenset({0}), frozenset())


def chosen(text, taken=None):
    """The target's own likeliest tokens, two levels of them; or, worse, likely ones that were not drawn."""
    tokens, tree = [text[-1] if text else 0], parse_paths("0 1 00 10")
    ways = [text]
    for parent in tree.parents[1:]:
        way = ways[parent]
        used = {ways[node][-1] for node in range(1, len(ways)) if tree.parents[node] == parent}
        if taken is not None and parent == 0:
            used |= {taken.tokens[child].item() for child in taken.children[0]}
        left = [token for token in range(3) if token not in used] or [0]
        tokens.append(max(left, key=lambda token, way=way: float(P[way][token])))
        ways.append((*way, tokens[-1]))
    return Draft(tokens, tree.parents, [1, 0.9, 0.8, 0.7, 0.9])


def fused(drafts_made, most):
    merged = merge_drafts(drafts_made)
    values = FuseCalibration.empty(len(drafts_made)).values_of(merged).values
    first, drawn = fusing.fixed_nodes(merged, most)
    return chosen_of(merged, values, most, first, drawn)


def with_what_was_not_drawn(text):
    drawn = drafted(TWO_LEVELS, text)
    return [chosen(text, drawn), drawn]


WAYS = {
    "a drawn tree and a chosen one": (lambda text: [drafted(TWO_LEVELS, text), chosen(text)], 8),
    "a chosen one that knows what was drawn": (with_what_was_not_drawn, 9),
    "one drawn layer of two": (lambda text: [chosen(text), drafted(TWO_LEVELS, text)], 4),
    "no room for what was drawn": (lambda text: [chosen(text), drafted(TWO_LEVELS, text)], 1),
    "two that draw": (lambda text: [drafted(LINE, text), drafted(TWO_LEVELS, text), chosen(text)], 5),
}


@pytest.mark.parametrize("way", thinned(WAYS, len(WAYS)))
def test_texts_have_the_targets_distribution(way):
    made, most = WAYS[way]
    assert fits(texts(lambda text: fused(made(text), most), accept_walk)) > 0.001


def test_the_check_finds_drawn_nodes_left_out_by_their_value(monkeypatch):
    made, _ = WAYS["one drawn layer of two"]
    monkeypatch.setattr(Draft, "ranked", lambda draft: np.argsort(-draft.values, kind="stable"))
    monkeypatch.setattr(fusing, "fixed_nodes", lambda merged, _: (ROOT_NODE, frozenset(merged.draft.sampled_from)))
    assert fits(texts(lambda text: fused(made(text), 3), accept_walk)) < 1e-6
