"""Random trees and drafts for hypothesis, and how long searches of calls of `generate` run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from token_recycling import Draft, Template


def fuzz(cases: int) -> settings:
    """So many cases, each of which may take seconds."""
    return settings(max_examples=cases, suppress_health_check=list(HealthCheck))


def rank_paths(shape: Draft | Template) -> list[tuple[int, ...]]:
    """Every node as its ranks from the root down."""
    ranks = shape.ranks.tolist()
    return [tuple(ranks[node] for node in lineage[1:]) for lineage in shape.lineages]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> Template:
    """Any tree of 1 to `max_nodes` nodes."""
    size = draw(st.integers(1, max_nodes))
    parents, ranks, siblings = [-1], [0], [0] * size
    for node in range(1, size):
        # Parents that never decrease keep the nodes in order of depth.
        parent = draw(st.integers(max(parents[-1], 0), node - 1))
        parents.append(parent)
        ranks.append(siblings[parent])
        siblings[parent] += 1
    return Template(tuple(parents), tuple(ranks))


@st.composite
def drafts(draw: st.DrawFn, vocab_size: int = 4, distinct_siblings: bool = False) -> Draft:
    """A tree with random tokens; few tokens make long agreement likely."""
    tree = draw(trees(max_nodes=16))
    if distinct_siblings and tree.breadth > vocab_size:
        vocab_size = tree.breadth
    tokens = [draw(st.integers(0, vocab_size - 1)) for _ in range(len(tree))]
    if distinct_siblings:
        for children in tree.children:
            order = draw(st.permutations(range(vocab_size)))
            for child, token in zip(children, order, strict=False):
                tokens[child] = token
    return Draft(tokens, tree.parents)
