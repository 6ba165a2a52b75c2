"""Trees: their views and their masks against brute force, templates, and what makes none."""

import itertools
import pickle
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.strategies import trees

from token_recycling import Tree
from token_recycling.trees.templates import chain, grow, paper, parse_paths, template_from

CPU = torch.device("cpu")


def test_the_template_is_that_of_the_paper():
    tree = paper()
    assert len(tree) == 81
    assert tree.layer_sizes == (8, 21, 25, 15, 8, 3)
    assert (tree.breadth, tree.depth) == (8, 6)
    assert tree.paths[-3:] == ((0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 1), (0, 0, 0, 1, 0, 0))
    assert paper() is tree


REFUSED: list[tuple[Callable[..., Tree | None], tuple[Any, ...], str]] = [
    *((parse_paths, (text,), "rank path") for text in ("a", "0 0x", "0 -1", ".", "0 ²")),
    (Tree.from_paths, ([(0,), (0,)],), r"\(0,\) twice"),
    (Tree.from_paths, ([(0,), (1, 0)],), r"the parent \(1,\) of path \(1, 0\)"),
    (Tree.from_paths, ([(0,), (0, -1)],), r"\(0, -1\)"),
    (Tree, ((), ()), "root"),
    (Tree, ((0,), (0,)), "root"),
    (Tree, ((-1, 0), (0,)), "equally many"),
    (Tree, ((-1, 1), (0, 0)), "parent of node 1"),
    (Tree, ((-1, -1), (0, 0)), "parent of node 1"),
    *((grow, given, "got|none") for given in (([0.5], 0), ([], 3), ([1.5], 3), ([-0.1], 3))),
    *(
        (template_from, (spec,), r"got|is no tree|none")
        for spec in ("", "nonsense", "chain:", "chain:x", "chain:0", "0 00 11", 0, -3, "no/such/file")
    ),
]


@pytest.mark.parametrize(("make", "given", "message"), REFUSED)
def test_what_makes_no_tree_is_refused(make, given, message):
    with pytest.raises(ValueError, match=message):
        make(*given)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4), st.integers(1, 12))
def test_no_node_left_out_is_better_than_one_taken(acceptance, nodes):
    tree = grow(acceptance, nodes, max_depth=4)
    everything = [path for depth in range(1, 5) for path in itertools.product(range(len(acceptance)), repeat=depth)]
    assert len(tree) - 1 == min(nodes, len(everything))
    worth = {path: prod(acceptance[rank] for rank in path) for path in everything}
    best = sorted(worth.values(), reverse=True)[: len(tree) - 1]
    assert sorted((worth[path] for path in tree.paths[1:]), reverse=True) == pytest.approx(best)


def test_a_tree_can_be_specified_in_many_ways(tmp_path):
    file = tmp_path / "tree.txt"
    file.write_text("0 1\n00\n")
    assert template_from("paper") is paper()
    assert template_from("auto") is template_from(30) is template_from("30") is None
    assert template_from("chain:5") is chain(5)
    assert len(template_from("static:30")) == 31
    assert template_from("0 1 00").paths == template_from(str(file)).paths == ((), (0,), (1,), (0, 0))
    assert template_from(paper()) is paper()


@given(trees())
def test_ancestors_are_the_transitive_closure_of_parents(tree):
    n = len(tree)
    step = torch.eye(n, dtype=torch.bool)
    for node, parent in enumerate(tree.parents[1:], start=1):
        step[node, parent] = True
    closure = step
    for _ in range(n):
        closure = (closure.float() @ step.float()) > 0
    assert torch.equal(tree.on(CPU).ancestors, closure)
    assert torch.equal(closure.sum(1) - 1, torch.tensor(tree.depths))


@given(trees())
def test_the_views_of_a_tree_agree(tree):
    shape = tree.on(CPU)
    assert shape.parents.tolist() == [max(parent, 0) for parent in tree.parents]
    assert shape.depths.tolist() == list(tree.depths)
    assert max(tree.depths) == tree.depth
    assert sorted(node for layer in tree.layers for node in layer) == list(range(1, len(tree)))
    for node in range(len(tree)):
        assert tree.lineages[node][-1] == node
        assert len(tree.lineages[node]) == tree.depths[node] + 1 == len(tree.paths[node]) + 1
        assert all(tree.parents[child] == node for child in tree.children[node])
        assert tree.below(node) == [other for other in range(len(tree)) if shape.ancestors[other, node]]
    assert sum(map(len, tree.children)) == len(tree) - 1
    assert tree.drawn().count("\n") == len(tree) - 1
    again = Tree.from_paths(tree.paths)
    assert (again.parents, again.ranks) == (tree.parents, tree.ranks)


@given(trees(), st.integers(0, 6))
def test_cutting_drops_exactly_the_deeper_nodes(tree, depth):
    kept = tree.cut(depth)
    assert kept.paths == tuple(path for path in tree.paths if len(path) <= depth)


def test_a_pickled_tree_is_its_shape_alone():
    """Its tensors may be on a device that is not there where it is read."""
    tree = paper()
    tree.on(torch.device("meta"))
    again = pickle.loads(pickle.dumps(tree))
    assert (again.parents, again.ranks) == (tree.parents, tree.ranks)
    assert len(pickle.dumps(again)) == len(pickle.dumps(tree)) < 3000
