"""Chains, trees and graphs of a draft model that is a table: the next token depends only on the last one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.draft_tables import FORK, grown

from token_recycling.drafters._shared.graph import Rules


def bracketed(graph):
    """Return the unrolled tree: children in parentheses after each token, copies with a star."""
    draft = graph.unrolled(99)

    def node_text(node):
        below = " ".join(map(node_text, draft.children[node]))
        return f"{'*' * (node in graph.copied)}{int(draft.tokens[node])}{f'({below})' if below else ''}"

    return node_text(0)


@pytest.mark.parametrize(
    ("rules", "layers"),
    [
        (Rules(depth=2, k=2, nodes=99), [[1, 2]]),
        # Of 1 (0.6) and 2 (0.4) only 1 is probable enough to be expanded.
        (Rules(depth=2, k=2, nodes=99, theta_prob=0.5), [[1]]),
        # 4 (0.1) has less than 0.3 of its sibling's 0.9; 5 has 0.3 against its sibling's 0.7.
        (Rules(depth=3, k=2, nodes=99, theta_sib=0.3), [[1, 2], [3, 3, 5]]),
        (Rules(depth=3, k=2, nodes=99, theta_sib=0.5), [[1, 2], [3, 3]]),
        # With tau 1, the second 3 is merged with the first: 1 3 and 2 3 share exactly one last token.
        (Rules(depth=3, k=2, nodes=99, theta_sib=0.3, tau=1), [[1, 2], [3, 5]]),
        (Rules(depth=4, k=2, nodes=99, theta_sib=0.5, tau=2), [[1, 2], [3, 3], [6]]),
        # The best two nodes are 1 (0.6) and its child 3 (0.54): neither 2 (0.4) nor 3 is expanded.
        (Rules(depth=3, k=2, nodes=2), [[1]]),
        (Rules(depth=3, k=2, nodes=1), []),
    ],
)
def test_expanded_nodes(rules, layers):
    assert grown(FORK, rules)[1].layers == layers


def test_tree_has_the_most_probable_children_of_every_node():
    graph, _ = grown(FORK, Rules(depth=2, k=2, nodes=99))
    assert bracketed(graph) == "0(1(3 4) 2(3 5))"
    assert graph.probabilities == pytest.approx([1, 0.6, 0.4, 0.54, 0.06, 0.28, 0.12])


def test_children_of_a_merged_node_are_copied():
    """Both branches lead to 3. The probability of a copy is that of its path: 0.4 * 0.7 * 0.8."""
    graph, reader = grown(FORK, Rules(depth=3, k=2, nodes=99, theta_sib=0.3, tau=1))
    assert reader.parents == [[0, 0], [1, 2]]
    assert [graph.tokens[node] for node in graph.merged] == [3]
    assert bracketed(graph).startswith("0(1(3(6 7) 4) 2(3(*6 *7) 5(")
    draft = graph.unrolled(99)
    (copy,) = [node for node in graph.copied if draft.tokens[node] == 6]
    assert draft.values[copy] == pytest.approx(0.4 * 0.7 * 0.8)


def test_tau_includes_tokens_before_the_root():
    """The sequence ends with 5 0, the drafts continue with 1 or 2. A second 5 0 2 is merged with the first 2."""
    table = {0: {1: 0.8, 2: 0.2}, 1: {5: 0.9}, 2: {7: 0.9}, 5: {0: 0.9}}
    rules = Rules(depth=5, k=2, nodes=99, theta_prob=0.1, tau=3)
    graph, _ = grown(table, rules, text=(5, 0))
    ((merged, first),) = graph.merged.items()
    assert (graph.tokens[merged], graph.parents[first]) == (2, 0)
    assert not grown(table, rules, text=(6, 0))[0].merged


def test_ids_beyond_the_targets_vocabulary_are_never_drafted():
    table = {0: {7: 0.9, 1: 0.1}, 1: {8: 0.9, 2: 0.1}}
    graph, _ = grown(table, Rules(depth=2, k=1, nodes=9), vocabulary=5)
    assert graph.tokens == [0, 1, 2]
    torch.manual_seed(0)
    for _ in range(20):
        graph, _ = grown(table, Rules(depth=2, k=2, nodes=9), vocabulary=5, warp=lambda logits: logits)
        assert max(graph.tokens) < 5
        assert all(q.shape == (5,) for q in graph.sampled_from.values())


def test_sampled_children_are_recorded_and_all_verified():
    """With five nodes and two children each, only one node besides the root is expanded."""
    torch.manual_seed(0)
    for _ in range(20):
        graph, reader = grown(FORK, Rules(depth=4, k=2, nodes=5), warp=lambda logits: logits)
        (layer,) = reader.layers
        assert layer == [max(graph.tokens[1:3], key=lambda token: float(reader.rows[0, token]))]
        draft = graph.unrolled(5)
        assert len(draft) == len(graph) == 5
        assert sorted(draft.sampled_from) == [1, 2, 3, 4]
        torch.testing.assert_close(draft.sampled_from[1], reader.rows[0])
        torch.testing.assert_close(draft.sampled_from[4], reader.rows[reader.layers[0][0]])


@st.composite
def tables(draw):
    """Return four tokens, each followed by all four with random probabilities."""
    weights = st.lists(st.integers(1, 9), min_size=4, max_size=4)
    return {
        token: {other: w / sum(row) for other, w in enumerate(row)}
        for token, row in ((token, draw(weights)) for token in range(4))
    }


RULES = st.builds(
    Rules,
    depth=st.integers(1, 6),
    k=st.integers(1, 4),
    nodes=st.integers(1, 40),
    theta_prob=st.sampled_from([0, 0.1, 0.3]),
    theta_sib=st.sampled_from([0, 0.3, 0.8]),
    tau=st.integers(0, 3),
)


@given(tables(), RULES, st.booleans(), st.integers(0, 10**6))
def test_every_graph_is_acyclic_and_unrolls_to_a_tree(table, rules, drawn, seed):
    torch.manual_seed(seed)
    graph, _ = grown(table, rules, text=(3, 1, 0), warp=(lambda logits: logits) if drawn else None)
    finished = set()

    def visit(node, above):
        assert node not in above
        if node not in finished:
            for following in graph.successors(node):
                visit(following, (*above, node))
        finished.add(node)

    visit(0, ())
    draft = graph.unrolled(rules.nodes)
    assert len(draft) <= rules.nodes + 1
    for siblings in draft.children:
        assert len({int(draft.tokens[child]) for child in siblings}) == len(siblings)
        ranks = [draft.ranks[child] for child in siblings]
        assert ranks == sorted(ranks)
    if drawn:
        assert len(draft) - len(graph.copied) == len(graph)
    elif not rules.tau:
        ours = sorted(draft.values, reverse=True)
        assert ours == pytest.approx(sorted(graph.probabilities, reverse=True)[: len(ours)])
    for node, first in graph.merged.items():
        assert not graph.children[node]
        assert graph._grams[node] == graph._grams[first]
