"""Drafts as values: what is left of one that is cut, or of which the first path is taken."""

import numpy as np
import torch
from hypothesis import given
from support.strategies import drafts

from token_recycling import Draft, Tree

BRANCHED = Tree.from_paths([(0,), (1,), (1, 0), (0, 2), (0, 3), (0, 2, 0)])


def test_the_first_path_keeps_what_is_said_of_its_nodes():
    """Nodes 1, 3 and 6: of every node the first child, whatever its rank."""
    shares = {3: torch.tensor([0.5, 0.5]), 4: torch.tensor([0.2, 0.8]), 6: torch.tensor([0.1, 0.9])}
    draft = Draft(BRANCHED, torch.arange(7), shares, np.arange(7, dtype=np.float32), frozenset({1, 2, 6}))
    chain = draft.chain()
    nodes = [BRANCHED.paths.index(path) for path in [(), (0,), (0, 2), (0, 2, 0)]]
    assert chain.tree.parents == (-1, 0, 1, 2)
    assert chain.tree.ranks == (0, 0, 2, 0)
    assert chain.tokens.tolist() == nodes
    assert chain.sampled_from == {place: shares[node] for place, node in enumerate(nodes) if node in shares}
    assert chain.confidence is not None
    assert chain.confidence.tolist() == nodes
    assert chain.needed == {place for place, node in enumerate(nodes) if node in draft.needed}


@given(drafts())
def test_a_first_path_is_a_path_of_the_draft_and_its_own_first_path(draft):
    chain = draft.chain()
    assert all(len(children) <= 1 for children in chain.tree.children)
    places = chain.places_in(draft)
    assert None not in places
    assert chain.chain() is chain


@given(drafts())
def test_a_part_is_what_its_nodes_say(draft):
    """Of the most likely nodes, which are closed under parents, however many there are."""
    sure = np.linspace(1, 0.3, len(draft.tree)).astype(np.float32)
    probabilities = Draft(draft.tree, draft.tokens, confidence=sure).probabilities
    assert probabilities is not None
    for node, parent in enumerate(draft.tree.parents[1:], start=1):
        np.testing.assert_allclose(probabilities[node], probabilities[parent] * sure[node])
    for size in range(1, len(draft.tree) + 1):
        nodes = sorted(np.argsort(-probabilities, kind="stable")[:size].tolist())
        part = Draft(draft.tree, draft.tokens, confidence=sure).part(nodes)
        assert part.tokens.tolist() == draft.tokens[nodes].tolist()
        assert [-1, *(nodes[parent] for parent in part.tree.parents[1:])] == [
            draft.tree.parents[node] for node in nodes
        ]
        np.testing.assert_array_equal(part.confidence, sure[nodes])
    assert draft.probabilities is None
