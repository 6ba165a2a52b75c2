"""Which size of tree pays on this machine: from a measured curve t(n) and from how often candidates are right.

A tree of n nodes is worth its expected tokens, the target's own included, over the cost t(n) of its forward pass in
units of t(1): how many times as fast as plain decoding the forward passes make it. Where a candidate of rank r is right
with one probability wherever it stands, the nodes of highest path product are the best tree of every size (Sequoia,
2402.12374, section 4.1), so that one growth gives the expected tokens of all sizes. In truth depths differ, and
drafting and learning cost time too: what comes out is a forecast, not a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..trees.templates import grow
from ..trees.tree import Tree
from .budget import paying_nodes, tokens_by_size
from .curve import CostCurve

MAX_DEPTH = 64
"""Of a template: no drafter here drafts deeper."""


class Size(NamedTuple):
    """A number of nodes and what it is worth."""

    nodes: int
    """Drafted nodes, the root left out; 0 is plain decoding."""
    tokens: float
    """Expected tokens a step, the target's own included."""
    cost: float
    """Time of the forward pass over nodes and root, in units of t(1)."""

    @property
    def times_plain(self) -> float:
        """Expected tokens per time of forward passes, plain decoding being 1."""
        return self.tokens / self.cost


def one_more(curve: CostCurve) -> list[float | None]:
    """For each size what one node more has cost since the size before, in units of t(1): the tokens that a node must be
    expected to bring. None for the first.
    """
    times = curve.relative()
    steps = zip(curve.sizes, curve.sizes[1:], strict=False)
    return [None, *(float(times[n - 1] - times[before - 1]) / (n - before) for before, n in steps)]


def expected_tokens(acceptance: Sequence[float], nodes: int) -> np.ndarray:
    """(nodes + 1,) float64: expected tokens a step of the best trees of 0, 1, ... drafted nodes, where a candidate of
    rank r is right with probability `acceptance[r]`.
    """
    if nodes < 1:
        return np.ones(1)
    paths = template(acceptance, nodes).paths[1:]
    gains = np.sort([np.prod([acceptance[rank] for rank in path]) for path in paths])[::-1]
    # A chain ends at the greatest depth: what would come after it gains nothing.
    return tokens_by_size(np.pad(gains, (0, nodes - len(gains))))


def best_size(curve: CostCurve, acceptance: Sequence[float]) -> Size:
    """The size of the most expected tokens per time; the smaller of two that are equal."""
    costs = curve.relative()
    tokens = expected_tokens(acceptance, len(costs) - 1)
    nodes = paying_nodes(tokens, costs)
    return Size(nodes, float(tokens[nodes]), float(costs[nodes]))


def template(acceptance: Sequence[float], nodes: int) -> Tree:
    """The tree of `nodes` drafted nodes with the most expected tokens; a chain ends at `MAX_DEPTH`."""
    return grow(acceptance, nodes, MAX_DEPTH)


def shared_chances(chance: float, ranks: int = 8) -> list[float]:
    """Acceptance by rank where each candidate is right with probability `chance` if all before it are wrong."""
    return [chance * (1 - chance) ** rank for rank in range(ranks)]


def rank_acceptance(found: Mapping[int, float]) -> list[float]:
    """`Stats.acceptance_by_rank` as one probability a rank, 0 for ranks that were never tried; raises ValueError where
    nothing was drafted.
    """
    if not found:
        raise ValueError(
            "expected drafted tokens to record the acceptance of, got none; give longer prompts, more tokens or "
            "another drafter"
        )
    return [found.get(rank, 0.0) for rank in range(max(found) + 1)]


def passes_cost(curve: CostCurve, steps_by_nodes: Mapping[int, int]) -> float:
    """What all forward passes of a run (`Stats.nodes`) cost by the curve, in units of t(1)."""
    times = curve.relative()
    return float(sum(times[nodes - 1] * steps for nodes, steps in steps_by_nodes.items()))
