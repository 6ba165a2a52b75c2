"""Sequences, trees and graphs of a draft model, where that is a table: what follows a token depends on it alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.draft_tables import FORK, grown

from token_recycling.drafters._shared.graph import Rules


def nested(graph):
    """The unrolled tree: the children of each token in brackets behind it, copies with a star."""
    draft = graph.unrolled(99)

    def written(node):
        below = " ".join(map(written, draft.children[node]))
        return f"{'*' * (node in graph.copied)}{int(draft.tokens[node])}{f'({below})' if below else ''}"

    return written(0)


@pytest.mark.parametrize(
    ("rules", "layers"),
    [
        (Rules(depth=2, k=2, nodes=99), [[1, 2]]),
        # Of 1 (0.6) and 2 (0.4) only 1 is likely enough to be followed.
        (Rules(depth=2, k=2, nodes=99, theta_prob=0.5), [[1]]),
        # 4 has 0.1 where its sibling has 0.9, below 0.3 of it; 5 has 0.3 where its sibling has 0.7.
        (Rules(depth=3, k=2, nodes=99, theta_sib=0.3), [[1, 2], [3, 3, 5]]),
        (Rules(depth=3, k=2, nodes=99, theta_sib=0.5), [[1, 2], [3, 3]]),
        # Where one token must recur, the second 3 is merged with the first; 1 3 and 2 3 end alike in no more than one.
        (Rules(depth=3, k=2, nodes=99, theta_sib=0.3, tau=1), [[1, 2], [3, 5]]),
        (Rules(depth=4, k=2, nodes=99, theta_sib=0.5, tau=2), [[1, 2], [3, 3], [6]]),
        # With room for two, those are 1 (0.6) and 3 below it (0.54): neither 2 (0.4) nor 3 need be read.
        (Rules(depth=3, k=2, nodes=2), [[1]]),
        (Rules(depth=3, k=2, nodes=1), []),
    ],
)
def test_which_nodes_are_followed(rules, layers):
    assert grown(FORK, rules)[1].layers == layers


def test_a_tree_has_the_likeliest_children_of_every_node():
    graph, _ = grown(FORK, Rules(depth=2, k=2, nodes=99))
    assert nested(graph) == "0(1(3 4) 2(3 5))"
    assert graph.probabilities == pytest.approx([1, 0.6, 0.4, 0.54, 0.06, 0.28, 0.12])


def test_what_follows_a_merged_node_is_copied():
    """Both branches come to 3. A copy is as likely as its path: 0.4 * 0.7 * 0.8."""
    graph, reader = grown(FORK, Rules(depth=3, k=2, nodes=99, theta_sib=0.3, tau=1))
    assert reader.parents == [[0, 0], [1, 2]]
    assert [graph.tokens[node] for node in graph.merged] == [3]
    assert nested(graph).startswith("0(1(3(6 7) 4) 2(3(*6 *7) 5(")
    draft = graph.unrolled(99)
    (copy,) = [node for node in graph.copied if draft.tokens[node] == 6]
    assert draft.values[copy] == pytest.approx(0.4 * 0.7 * 0.8)


def test_the_text_before_the_root_counts_for_tau():
    """The text ends with 5 0, the drafts go on with 1 or 2. Where 5 0 2 comes again, it is merged with the first 2."""
    table = {0: {1: 0.8, 2: 0.2}, 1: {5: 0.9}, 2: {7: 0.9}, 5: {0: 0.9}}
    rules = Rules(depth=5, k=2, nodes=99, theta_prob=0.1, tau=3)
    graph, _ = grown(table, rules, text=(5, 0))
    ((merged, first),) = graph.merged.items()
    assert (graph.tokens[merged], graph.parents[first]) == (2, 0)
    assert not grown(table, rules, text=(6, 0))[0].merged


def test_ids_beyond_the_targets_are_never_drafted():
    table = {0: {7: 0.9, 1: 0.1}, 1: {8: 0.9, 2: 0.1}}
    graph, _ = grown(table, Rules(depth=2, k=1, nodes=9), vocabulary=5)
    assert graph.tokens == [0, 1, 2]
    torch.manual_seed(0)
    for _ in range(20):
        graph, _ = grown(table, Rules(depth=2, k=2, nodes=9), vocabulary=5, warp=lambda logits: logits)
        assert max(graph.tokens) < 5
        assert all(q.shape == (5,) for q in graph.sampled_from.values())


def test_drawn_children_are_noted_and_all_verified():
    """With room for five nodes and two children each, only one more node is followed after the root."""
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
    """Four tokens, each followed by all four, as likely as may be."""
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
