"""The shape of a draft: depths, ancestors and children, which follow from the parents of its nodes.

A draft is verified in one forward pass by *tree attention*: every node sees the whole context and its own ancestors,
nothing else (Token Recycling, section 2.3). Node 0 is the root: the newest token of the sequence, not yet in the
key/value cache. Nodes are in order of depth, so a parent comes before its children, and cutting a draft keeps its first
nodes. A chain has one branch, and a lone root is plain autoregressive decoding.

The shapes of the newest drafts are kept: a template is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

_KEPT = 512
"""Number of shapes that are kept."""


class Shape:
    """Depths, ancestors and children in one shape, each worked out when it is first asked for."""

    def __init__(self, parents: Sequence[int]) -> None:
        """`parents` (n,), -1 for the root. Raises ValueError unless they are a tree in order of depth."""
        if not parents or parents[0] != -1:
            raise ValueError(f"node 0 must be the root, with parent -1, got parents {parents[:4]}")
        depths = [0]
        for node, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"the parent of node {node} must come before it, got {parent}")
            depths.append(depths[parent] + 1)
            if depths[node] < depths[node - 1]:
                raise ValueError(f"nodes must be in order of depth, got parents {parents}; `Draft.of` sorts them")
        self._parents = parents
        self.depths = np.array(depths)
        """(n,) int64: 0 for the root."""

    @cached_property
    def ancestors(self) -> np.ndarray:
        """(n, n) bool; row i marks the nodes that node i sees: its ancestors and itself."""
        ancestors = np.eye(len(self._parents), dtype=bool)
        for node, parent in enumerate(self._parents[1:], start=1):
            ancestors[node] |= ancestors[parent]
        return ancestors

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each node its children, in order."""
        children: list[list[int]] = [[] for _ in self._parents]
        for node, parent in enumerate(self._parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def lineages(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes from the root down to it, both included."""
        lineages: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self._parents[1:], start=1):
            lineages.append((*lineages[parent], node))
        return tuple(lineages)

    @cached_property
    def places(self) -> np.ndarray:
        """(n,) int64: the place of every node among its siblings."""
        places = np.zeros(len(self._parents), np.int64)
        for siblings in self.children:
            places[list(siblings)] = range(len(siblings))
        return places


class Shaped:
    """Base of what has nodes in such a shape: a draft, and a template of drafts."""

    parents: np.ndarray
    """(n,) int64: -1 for the root."""
    shape: Shape
    """That of `parents`, which others may share."""

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @property
    def depths(self) -> np.ndarray:
        """(n,) int64: 0 for the root."""
        return self.shape.depths

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return int(self.shape.depths[-1])

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each node its children, in order."""
        return self.shape.children

    @property
    def lineages(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes from the root down to it, both included."""
        return self.shape.lineages


def shape_of(parents: np.ndarray) -> Shape:
    """Return the shape of `parents` (n,) int64. Raises ValueError unless they are a tree in order of depth."""
    return _shape(parents.tobytes())


@lru_cache(_KEPT)
def _shape(key: bytes) -> Shape:
    return Shape(np.frombuffer(key, np.int64).tolist())


def branch(nodes: int) -> np.ndarray:
    """Return the parents of one branch, the root included."""
    return np.arange(-1, nodes - 1)


def star(nodes: int) -> np.ndarray:
    """Return the parents of a root with children only, the root included."""
    parents = np.zeros(nodes, np.int64)
    parents[0] = -1
    return parents


def by_depth(parents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return nodes (n,) int64 in order of depth, those of one depth as they come; `parents` names nodes that come
    before their children.
    """
    depths = [0] * len(parents)
    for node in range(1, len(parents)):
        depths[node] = depths[parents[node]] + 1
    return np.argsort(depths, kind="stable")


def part(parents: np.ndarray, nodes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the parents (m,) int64 of the shape of these nodes, sorted and with their parents."""
    places = np.full(len(parents) + 1, -1, np.int64)  # the last entry is the root's parent
    places[nodes] = np.arange(len(nodes))
    return places[parents[nodes]]
