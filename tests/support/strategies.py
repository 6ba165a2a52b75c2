"""Random trees and drafts for hypothesis, and its settings for fuzzing calls of `generate`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from token_recycling import Draft, Template


def fuzz(cases: int) -> settings:
    """Return settings for a number of cases, each of which may take seconds."""
    return settings(max_examples=cases, suppress_health_check=list(HealthCheck))


def rank_paths(shape: Draft | Template) -> list[tuple[int, ...]]:
    """Return the path of ranks from the root to each node."""
    ranks = shape.ranks.tolist()
    return [tuple(ranks[node] for node in lineage[1:]) for lineage in shape.lineages]


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> Template:
    """Generate any tree of 1 to `max_nodes` nodes."""
    size = draw(st.integers(1, max_nodes))
    parents, ranks, siblings = [-1], [0], [0] * size
    for node in range(1, size):
        # Non-decreasing parents keep the nodes in order of depth.
        parent = draw(st.integers(max(parents[-1], 0), node - 1))
        parents.append(parent)
        ranks.append(siblings[parent])
        siblings[parent] += 1
    return Template(tuple(parents), tuple(ranks))


@st.composite
def drafts(draw: st.DrawFn, vocab_size: int = 4, distinct_siblings: bool = False) -> Draft:
    """Generate a tree with random tokens; a small vocabulary makes long accepted paths likely."""
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
