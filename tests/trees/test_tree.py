"""Trees: views and masks compared with brute force, templates, and invalid trees."""

from collections.abc import Callable
from itertools import islice, product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import rank_paths, trees

from token_recycling import Draft, Template
from token_recycling.trees.templates import best_paths, chain, grow, paper, parse_paths, template_from, tree_of


def test_paper_template_has_the_published_shape():
    tree = paper()
    assert len(tree) == 81
    assert np.bincount(tree.depths).tolist() == [1, 8, 21, 25, 15, 8, 3]
    assert (tree.breadth, tree.depth) == (8, 6)
    assert rank_paths(tree)[-3:] == [(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0)]
    assert paper() is tree


REFUSED: list[tuple[Callable[..., Template | None], tuple[Any, ...], str]] = [
    *((parse_paths, (text,), "rank path") for text in ("a", "0 0x", "0 -1", ".", "0 ²")),
    (Template.from_paths, ([(0,), (0,)],), r"\(0,\) twice"),
    (Template.from_paths, ([(0,), (1, 0)],), r"the parent \(1,\) of path \(1, 0\)"),
    (Template.from_paths, ([(0,), (0, -1)],), r"\(0, -1\)"),
    (Template, ((), ()), "root"),
    (Template, ((0,), (0,)), "root"),
    (Template, ((-1, 0), (0,)), "equal lengths"),
    (Template, ((-1, 1), (0, 0)), "parent of node 1"),
    (Template, ((-1, -1), (0, 0)), "parent of node 1"),
    *((grow, given, "got|none") for given in (([0.5], 0), ([], 3), ([1.5], 3), ([-0.1], 3))),
    *(
        (template_from, (spec,), r"got|is not a tree|none")
        for spec in ("", "nonsense", "chain:", "chain:x", "chain:0", "0 00 11", 0, -3, "no/such/file")
    ),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED)
def test_invalid_trees_are_refused(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(*given)


@given(st.lists(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=3), min_size=1, max_size=3))
def test_first_n_paths_are_the_best_tree_of_n_nodes(probabilities):
    found = list(best_paths(probabilities))
    depths = range(1, len(probabilities) + 1)
    every = [path for depth in depths for path in product(*(range(len(ranks)) for ranks in probabilities[:depth]))]
    assert sorted(path for _, path in found) == sorted(every)
    assert [chance for chance, _ in found] == sorted((chance for chance, _ in found), reverse=True)
    for chance, path in found:
        assert chance == pytest.approx(prod(ranks[rank] for ranks, rank in zip(probabilities, path, strict=False)))
    for nodes in range(1, len(found) + 1):
        assert len(tree_of(islice(best_paths(probabilities), nodes))) == nodes + 1
    first, depth = probabilities[0], len(probabilities)
    same = tree_of(islice(best_paths([first] * depth), len(found)))
    assert rank_paths(grow(first, len(found), depth)) == rank_paths(same)


def test_every_form_of_tree_specification_is_accepted(tmp_path):
    file = tmp_path / "tree.txt"
    file.write_text("0 1\n00\n")
    assert template_from("paper") is paper()
    assert template_from("auto") is template_from(30) is template_from("30") is None
    assert template_from("chain:5") is chain(5)
    assert len(template_from("static:30")) == 31
    for spec in ("0 1 00", str(file)):
        assert rank_paths(template_from(spec)) == [(), (0,), (1,), (0, 0)]
    assert template_from(paper()) is paper()


@given(trees())
def test_ancestors_are_the_transitive_closure_of_parents(tree):
    n = len(tree)
    step = np.eye(n, dtype=bool)
    step[np.arange(1, n), tree.parents[1:]] = True
    closure = step
    for _ in range(n):
        closure = closure @ step
    np.testing.assert_array_equal(tree.ancestors, closure)
    np.testing.assert_array_equal(closure.sum(1) - 1, tree.depths)


@given(trees())
def test_views_of_a_tree_agree(tree):
    lineages, children = tree.lineages, tree.children
    ranks = Draft(tree.parents, tree.parents).ranks
    assert max(tree.depths) == tree.depth
    for node in range(len(tree)):
        assert lineages[node][-1] == node
        assert len(lineages[node]) == tree.depths[node] + 1
        assert all(tree.parents[child] == node for child in children[node])
        assert np.flatnonzero(tree.ancestors[node]).tolist() == list(lineages[node])
        assert [ranks[child] for child in children[node]] == [*range(len(children[node]))]
    assert sum(map(len, children)) == len(tree) - 1
    again = Template.from_paths(rank_paths(tree))
    np.testing.assert_array_equal(again.parents, tree.parents)
    np.testing.assert_array_equal(again.ranks, tree.ranks)


@given(trees(), st.integers(0, 6))
def test_cutting_drops_exactly_the_deeper_nodes(tree, depth):
    assert rank_paths(tree.cut(depth)) == [path for path in rank_paths(tree) if len(path) <= depth]
