"""Drafts as values: conversions, validation, cuts, parts and the first branch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import drafts

from token_recycling import Draft, Step
from token_recycling._util.topk import top_candidates

PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def test_first_branch_keeps_attributes_of_its_nodes():
    shares = {3: torch.tensor([0.5, 0.5]), 4: torch.tensor([0.2, 0.8]), 6: torch.tensor([0.1, 0.9])}
    draft = Draft(range(7), PARENTS, np.arange(7), shares, frozenset({1, 2, 6}))
    chain, nodes = draft.first_branch(), [0, 1, 3, 6]
    assert chain.parents.tolist() == [-1, 0, 1, 2]
    assert chain.tokens.tolist() == nodes
    assert chain.sampled_from == {place: shares[node] for place, node in enumerate(nodes) if node in shares}
    assert chain.probabilities is not None
    assert chain.probabilities.tolist() == nodes
    assert chain.needed == {place for place, node in enumerate(nodes) if node in draft.needed}


@given(drafts())
def test_first_branch_is_a_path_and_its_own_first_branch(draft):
    chain = draft.first_branch()
    assert all(len(children) <= 1 for children in chain.children)
    places = chain.places_in(draft)
    assert None not in places
    assert chain.first_branch() is chain


@given(drafts())
def test_part_keeps_tokens_parents_and_probabilities(draft):
    """Parts of the most probable nodes, which are closed under parents, of every size."""
    sure = np.linspace(1, 0.3, len(draft)).astype(np.float32)
    whole = Draft(draft.tokens, draft.parents, sure)
    values = whole.values
    assert values is not None
    for node, parent in enumerate(draft.parents[1:], start=1):
        np.testing.assert_allclose(values[node], values[parent] * sure[node])
    for size in range(1, len(draft) + 1):
        nodes = sorted(np.argsort(-values, kind="stable")[:size].tolist())
        part = whole.part(nodes)
        assert part.tokens.tolist() == draft.tokens[nodes].tolist()
        assert [-1, *(nodes[parent] for parent in part.parents[1:])] == draft.parents[nodes].tolist()
        np.testing.assert_array_equal(part.probabilities, sure[nodes])
    assert draft.values is None


def test_candidates_of_the_device_are_used_if_there_are_enough():
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(0))
    draft, known = Draft.chain([1, 2, 3]), top_candidates(logits, 2)
    step = Step(draft, logits, [0], [1], finished=False, candidates=known)
    for k, nodes in ((1, None), (2, np.array([2, 0])), (3, np.array([1]))):
        assert all(map(np.array_equal, step.top(k, nodes), top_candidates(logits, k, nodes)))


def test_sampled_draft_is_cut_regardless_of_probabilities():
    q = torch.full((3,), 1 / 3)
    draft = Draft([0, 1, 2], [-1, 0, 0], [1, 0.1, 0.9], {1: q, 2: q}, frozenset({1, 2}))
    assert draft.most_probable(2).tokens.tolist() == [0, 1]


@given(drafts(), st.integers(0, 6))
def test_cutting_drops_exactly_the_deeper_nodes(draft, depth):
    kept = [node for node, at in enumerate(draft.depths) if at <= depth]
    cut = draft.cut(depth)
    assert cut.tokens.tolist() == draft.tokens[kept].tolist()
    assert cut.parents.tolist() == draft.parents[kept].tolist()


@given(drafts(), st.randoms(use_true_random=False))
def test_nodes_are_sorted_by_depth(draft, random):
    """Given in the order of a drafter's growth: every parent before its children."""
    order, waiting = [0], [*draft.children[0]]
    while waiting:
        order.append(waiting.pop(random.randrange(len(waiting))))
        waiting += draft.children[order[-1]]
    parents = [-1, *(order.index(draft.parents[node]) for node in order[1:])]
    made = Draft.of(draft.tokens[order], parents, np.ones(len(order)))
    assert sorted(made.depths) == list(made.depths) == list(draft.depths)
    assert sorted(map(tuple, paths(made))) == sorted(map(tuple, paths(draft)))


def paths(draft):
    return [draft.tokens[list(lineage)].tolist() for lineage in draft.lineages]


def test_lists_and_tensors_become_arrays():
    draft = Draft(torch.tensor([5, 6], dtype=torch.int32), (-1, 0), [1, 0.5])
    dtypes = [array.dtype for array in (draft.tokens, draft.parents, draft.probabilities)]
    assert dtypes == [np.int64, np.int64, np.float32]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "node 0 must be the root"),
        ([1], [0], "node 0 must be the root"),
        ([1, 2], [-1], "equal lengths"),
        ([1, 2], [-1, 1], "parent of node 1"),
        ([1, 2], [-1, -1], "parent of node 1"),
        ([1, 2, 3, 4], [-1, 0, 1, 0], "order of depth"),
    ],
)
def test_invalid_drafts_are_refused(tokens, parents, message):
    with pytest.raises(ValueError, match=message):
        Draft(tokens, parents)
