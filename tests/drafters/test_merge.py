"""Merged drafts: merging and weights by hand, the best nodes compared with a search, exactness of sampled nodes."""

import dataclasses

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
    """Return the tokens from the root to every other node."""
    return paths_of(tree_of.draft if isinstance(tree_of, Merged) else tree_of)[1:]


def best_nodes(merged, values, most, first=ROOT_NODE, drawn=frozenset()):
    """Return the draft of the best nodes of a merged draft."""
    return valued_draft(merged, np.array(values), drawn, first).first_ranked(1 + most)


# Two small drafts: 7 and 8 after the root, 9 after 7; and 8, then 6 and 9 after it.
ONE = draft("0 1 00", [7, 8, 9], [0.6, 0.2, 0.5])
TWO = draft("0 00 01", [8, 6, 9], [0.5, 0.7, 0.1])


# Merging


def test_merge_of_two_drafts():
    merged = merge_drafts([ONE, TWO])
    assert paths(merged) == [(7,), (8,), (7, 9), (8, 6), (8, 9)]
    assert merged.draft.tokens[0] == ROOT
    assert merged.draft.depths.tolist() == [0, 1, 1, 2, 2, 2]
    assert merged.ranks.tolist() == [[0, 0], [0, -1], [1, 0], [0, -1], [-1, 0], [-1, 1]]
    assert merged.confidences[1:].tolist() == pytest.approx(
        np.array([[0.6, 0], [0.2, 0.5], [0.5, 0], [0, 0.7], [0, 0.1]])
    )


@given(st.lists(drafts(), min_size=2, max_size=4), st.integers(0, 20), st.integers(0, 10**6))
def test_fused_draft_is_a_tree_of_proposed_nodes(proposed, most, seed):
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
    fused = best_nodes(merged, values, most)
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


# Weights


def test_probabilities_of_siblings_sum_to_one():
    sure = draft("0 1 00", [7, 8, 9], [1.0, 9.0, 1.0])
    merged = merge_drafts([sure, Draft.chain([ROOT])])
    assert FuseCalibration.empty(2).values_of(merged).values.tolist() == pytest.approx([1, 0.5, 0.5, 0.5])


def test_acceptance_of_each_part_is_learned():
    """The first part is confident and always wrong, the second the opposite: their order is reversed."""
    merged = merge_drafts([draft("0", [7], [0.9]), draft("0", [8], [0.2])])
    calibration = FuseCalibration.empty(2)
    assert paths(best_nodes(merged, calibration.values_of(merged).values, 1)) == [(7,)]
    for _ in range(20):
        calibration.learn(merged, calibration.values_of(merged), [8, 3])
    values = calibration.values_of(merged).values
    assert paths(best_nodes(merged, values, 1)) == [(8,)]
    assert values[1] < 0.1
    assert values[2] > 0.8


# Pruning


def test_only_nodes_that_pay_are_kept():
    star = Draft.of(range(5), [-1, 0, 0, 0, 0], [1, 0.9, 0.8, 0.1, 0.05])
    flat, steep = np.array([1.0, 1.05, 1.1, 1.15, 1.2]), np.array([1.0, 3, 5, 7, 9])

    def kept(times, needed=frozenset(), ratio=1.0):
        return prune([dataclasses.replace(star, needed=needed)], times, [ratio])[0].tokens.tolist()

    assert kept(flat) == [0, 1, 2]
    assert kept(steep) == [0]
    # If drafting took ten times a forward pass, verifying more nodes pays.
    assert kept(flat + 10.0) == [0, 1, 2, 3, 4]
    # Needed nodes are kept, whether they pay or not.
    assert kept(np.array([1.0, 2, 20, 40, 60]), frozenset({4})) == [0, 4]
    # At a forecast ratio of 0.01, nothing pays.
    assert kept(flat, ratio=0.01) == [0]


def test_drafts_without_probabilities_and_sampled_drafts_stay_whole():
    """Other drafts keep at least as many nodes as the largest of these."""
    sure = Draft.of(range(4), [-1, 0, 1, 2], [1, 0.9, 0.9, 0.9])
    silent = Draft.of(range(3), [-1, 0, 0])
    sampled = Draft.of(range(2), [-1, 0], [1, 0.1], sampled_from={1: torch.full((9,), 1 / 9)})
    dear = np.array([1.0, 9, 99, 999])
    assert [len(one) for one in prune([sure, silent, sampled], dear, [1.0] * 3)] == [3, 3, 2]
    assert [len(one) for one in prune([sure, sampled], dear, [1.0] * 2)] == [2, 2]
    assert [len(one) for one in prune([sure], dear, [1.0])] == [1]


# Sampled nodes


def test_sampled_nodes_keep_their_order_before_others():
    """8 then 7 were sampled; the other draft comes first and has 7 and 9."""
    q = torch.full((10,), 0.1)
    drawn = draft("0 1 00", [8, 7, 9], sampled_from={1: q, 2: q, 3: q})
    merged = merge_drafts([draft("0 1", [7, 9], [0.9, 0.05]), drawn])
    assert paths(merged) == [(8,), (7,), (9,), (8, 9)]
    first, still_drawn = fixed_nodes(merged, 4)
    assert (first, still_drawn) == ({0, 1, 2, 4}, {1, 2, 4})
    values = np.array([1, 0.1, 0.1, 0.05, 0.01])
    fused = best_nodes(merged, values, 4, first, still_drawn)
    assert paths(fused) == paths(merged)
    assert sorted(fused.sampled_from) == [1, 2, 4]
    # With three nodes, the second layer counts as chosen and is dropped for its value.
    first, still_drawn = fixed_nodes(merged, 2)
    assert (first, still_drawn) == ({0, 1, 2}, {1, 2})
    assert fixed_nodes(merged, 1) == ({0}, frozenset())
    # Nodes that a drafter needs are kept too, if all of them fit.
    merged = merge_drafts([ONE, dataclasses.replace(TWO, needed=frozenset({2, 3}))])
    assert fixed_nodes(merged, 3) == (frozenset({0, 2, 4, 5}), frozenset())
    assert fixed_nodes(merged, 2) == (frozenset({0}), frozenset())


def chosen_draft(text, taken=None):
    """Return the target's most probable tokens on two levels, optionally only those that were not sampled."""
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


def fused_draft(drafts_made, most):
    merged = merge_drafts(drafts_made)
    values = FuseCalibration.empty(len(drafts_made)).values_of(merged).values
    first, drawn = fixed_nodes(merged, most)
    return best_nodes(merged, values, most, first, drawn)


def with_tokens_not_sampled(text):
    drawn = drafted(TWO_LEVELS, text)
    return [chosen_draft(text, drawn), drawn]


WAYS = {
    "a sampled tree and a chosen one": (lambda text: [drafted(TWO_LEVELS, text), chosen_draft(text)], 8),
    "a chosen tree that depends on the samples": (with_tokens_not_sampled, 9),
    "one sampled layer of two": (lambda text: [chosen_draft(text), drafted(TWO_LEVELS, text)], 4),
    "no room for the samples": (lambda text: [chosen_draft(text), drafted(TWO_LEVELS, text)], 1),
    "two sampled drafts": (lambda text: [drafted(LINE, text), drafted(TWO_LEVELS, text), chosen_draft(text)], 5),
}


@pytest.mark.parametrize("way", thinned(WAYS, len(WAYS)))
def test_outputs_have_the_targets_distribution(way):
    made, most = WAYS[way]
    assert fits(texts(lambda text: fused_draft(made(text), most), accept_walk)) > 0.001


def test_check_detects_sampled_nodes_dropped_by_value(monkeypatch):
    made, _ = WAYS["one sampled layer of two"]
    monkeypatch.setattr(Draft, "ranked", lambda draft: np.argsort(-draft.values, kind="stable"))
    assert fits(texts(lambda text: fused_draft(made(text), 3), accept_walk)) < 1e-6
