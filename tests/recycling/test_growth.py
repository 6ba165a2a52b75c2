"""Growth of trees: mixtures computed by hand, and growth compared with a search over all trees."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.matrices import Grower, close, matrix_of

from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.recycling.recycler import Recycler

# Candidates


def test_each_longer_context_has_two_fifths_of_the_weight():
    rows = {(5,): {10: 0.5, 11: 0.25}, (4, 5): {11: 0.5, 12: 0.5}, (3, 4, 5): {12: 1.0}}
    one = {10: 0.8 * 0.5, 11: 0.8 * 0.25}
    two = {11: 0.6 * one[11] + 0.4 * 0.5, 10: 0.6 * one[10], 12: 0.4 * 0.5}
    three = {12: 0.6 * two[12] + 0.4, 11: 0.6 * two[11], 10: 0.6 * two[10]}
    for orders, wanted in ((1, one), (2, two), (3, three)):
        known = {context: row for context, row in rows.items() if len(context) <= orders}
        # Longer contexts overwrite nothing here: the shorter ones are learned after them.
        grower = Grower(matrix_of(known, orders=orders), [3, 4, 5])
        grower.grow(1)
        close(grower.children(), dict(sorted(wanted.items(), key=lambda item: -item[1])))


# Growth compared with a search over all trees

ROWS = st.dictionaries(st.integers(0, 4), st.lists(st.integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=5)


def chain_of_rows(drawn, seed):
    """Return a matrix of five tokens with up to three candidates each, of unequal probabilities."""
    generator = np.random.default_rng(seed)
    rows = {}
    for token, weights in drawn.items():
        ids = generator.permutation(5)[: len(weights)]
        shares = np.sort(np.array(weights) / (sum(weights) + generator.uniform(1, 30)))[::-1]
        rows[(token,)] = {int(one): float(share) for one, share in zip(ids, shares, strict=True)}
    return matrix_of(rows, vocab_size=5)


def values(matrix, root, depth):
    """Return the probability of every path up to `depth`, computed from the rows alone."""
    found = {}
    layer = {(): 1.0}
    for _ in range(depth):
        layer = {
            (*path, token): value * share
            for path, value in layer.items()
            for token, share in probabilities_after(matrix, (root, *path)).items()
        }
        found.update(layer)
    return found


def probabilities_after(matrix, text):
    """Interpolate the row of the last token with the candidates at the previous position."""
    beside = matrix.look_up(text[-2]) if len(text) > 1 else []
    mixed = {token: 0.1 * share for token, share in beside if share and token != text[-1]}
    row = {token: share for token, share in matrix.look_up(text[-1]) if share}
    if not row:
        return mixed
    return {token: 0.2 * mixed.get(token, 0.0) + 0.8 * row.get(token, 0.0) for token in {**mixed, **row}}


@given(ROWS, st.integers(0, 4), st.integers(0, 1000), st.integers(1, 30), st.integers(1, 4))
def test_nodes_grow_best_first(drawn, root, seed, nodes, depth):
    matrix = chain_of_rows(drawn, seed)
    grower = Grower(matrix, [root])
    made = grower.grow(nodes, depth)
    growing = grower.growing
    found = values(matrix, root, depth)
    assert made == 1 + min(nodes, len(found))
    gains = growing["value"][:made].tolist()
    assert gains == sorted(gains, reverse=True)
    assert gains[1:] == pytest.approx(sorted(found.values(), reverse=True)[: made - 1], rel=1e-4)
    well_formed(grower, made, depth)


def well_formed(grower, made, depth):
    """Assert that parents precede children, siblings have distinct tokens and ranks, and no node is too deep."""
    growing = grower.growing
    assert growing["parent"][0] == -1
    for node in range(1, made):
        assert 0 <= growing["parent"][node] < node
        assert growing["depth"][node] == growing["depth"][growing["parent"][node]] + 1 <= depth
        parent, rank = growing["parent"][node], growing["rank"][node]
        assert growing["candidates"][parent, rank] == growing["token"][node]
    assert len(set(grower.paths(made))) == made - 1
    siblings = list(zip(growing["parent"][1:made], growing["rank"][1:made], strict=True))
    assert len(set(siblings)) == made - 1


@given(
    ROWS,
    st.integers(0, 4),
    st.integers(0, 1000),
    st.lists(st.floats(0.0, 0.6), min_size=0, max_size=14),
    st.integers(1, 5),
)
def test_tree_size_maximizes_tokens_per_second(drawn, root, seed, rises, depth):
    """Compared with all sizes, for cost curves of any shape, including steps and plateaus."""
    matrix = chain_of_rows(drawn, seed)
    costs = np.cumsum([1.0, *rises])
    gains = sorted(values(matrix, root, depth).values(), reverse=True)[: len(rises)]
    expected = np.cumsum([1.0, *gains])
    rates = expected / costs[: len(expected)]
    made = Grower(matrix, [root]).grow_for(costs.tolist(), depth)
    assert rates[made - 1] == pytest.approx(rates.max(), rel=1e-5)
    # Of equally good sizes, the smallest.
    assert all(rates[:made] <= rates[made - 1] * (1 + 1e-5))


def test_arrays_are_reused_by_later_growths():
    matrix = matrix_of({(token,): {(token + 1) % 5: 0.6, (token + 2) % 5: 0.3} for token in range(5)}, vocab_size=5)
    used, tokens = Recycler(matrix, np.array([0]), 50), np.array([0])
    for depth in (4, 2, 9, 1):
        grown, fresh = used.draft(tokens, depth), Grower(matrix, [0])
        assert fresh.grow(50, depth) == len(grown)
        for name in ("token", "parent", "value"):
            np.testing.assert_array_equal(grown[name], fresh.growing[name])


def test_history_that_has_grown_meanwhile_is_searched():
    """As by the outputs of other sequences: its arrays are replaced by larger ones."""
    matrix = NgramMatrix(64, k=1, orders=1, history=1 << 14)
    recycler = Recycler(matrix, np.array([3, 4]), 4)
    recycler.draft(np.array([3, 4]), 4)
    matrix.history.extend([*np.arange(2000) % 50 + 12, 5, 6, 7, 8, 9])
    assert recycler.draft(np.array([3, 4, 5, 6, 7]), 4)["token"][:3].tolist() == [7, 8, 9]
