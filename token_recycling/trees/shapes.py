"""The shape of a draft: depths, ancestors and children as functions of the parents of its nodes.

A draft is verified in one forward pass by *tree attention*: every node sees the whole context and its own ancestors,
nothing else (Token Recycling, section 2.3). Node 0 is the root: the newest token of the sequence, not yet in the
key/value cache. Nodes are in order of depth, so a parent comes before its children, and cutting a draft keeps its first
nodes. A chain has one branch, and a lone root is plain autoregressive decoding.

`parents` is (n,) int64, -1 for the root. Results are kept for the shapes seen last: a template is worked out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_KEPT = 512
"""Shapes whose depths, ancestors and children are kept."""


class Shaped:
    """Base of what has nodes in such a shape: a draft, and a template of drafts."""

    parents: np.ndarray
    """(n,) int64: -1 for the root."""

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @property
    def depths(self) -> np.ndarray:
        """(n,) int64: 0 for the root."""
        return depths(self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return int(self.depths[-1])


def depths(parents: np.ndarray) -> np.ndarray:
    """Return the depth (n,) int64 of every node, 0 for the root. Raises ValueError unless `parents` is a shape."""
    return _depths(parents.tobytes())


def ancestors(parents: np.ndarray) -> np.ndarray:
    """Return (n, n) bool; row i marks the nodes that node i sees: its ancestors and itself."""
    return _ancestors(parents.tobytes())


def children(parents: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return for each node its children, in order."""
    return _children(parents.tobytes())


def lineages(parents: np.ndarray) -> tuple[tuple[int, ...], ...]:
    """Return for each node the nodes from the root down to it, both included."""
    return _lineages(parents.tobytes())


def ranks(parents: np.ndarray) -> np.ndarray:
    """Return the place (n,) int64 of every node among its siblings."""
    return _ranks(parents.tobytes())


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


@lru_cache(_KEPT)
def _depths(key: bytes) -> np.ndarray:
    parents = np.frombuffer(key, np.int64).tolist()
    if not parents or parents[0] != -1:
        raise ValueError(f"node 0 must be the root, with parent -1, got parents {parents[:4]}")
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(f"the parent of node {node} must come before it, got {parent}")
        depths.append(depths[parent] + 1)
        if depths[node] < depths[node - 1]:
            raise ValueError(f"nodes must be in order of depth, got parents {parents}; `Draft.of` sorts them")
    return np.array(depths)


@lru_cache(_KEPT)
def _ancestors(key: bytes) -> np.ndarray:
    parents = np.frombuffer(key, np.int64).tolist()
    seen = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents[1:], start=1):
        seen[node] |= seen[parent]
    return seen


@lru_cache(_KEPT)
def _children(key: bytes) -> tuple[tuple[int, ...], ...]:
    parents = np.frombuffer(key, np.int64).tolist()
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    return tuple(map(tuple, children))


@lru_cache(_KEPT)
def _lineages(key: bytes) -> tuple[tuple[int, ...], ...]:
    parents = np.frombuffer(key, np.int64).tolist()
    lineages: list[tuple[int, ...]] = [(0,)]
    for node, parent in enumerate(parents[1:], start=1):
        lineages.append((*lineages[parent], node))
    return tuple(lineages)


@lru_cache(_KEPT)
def _ranks(key: bytes) -> np.ndarray:
    ranks = np.zeros(len(key) // 8, np.int64)
    for siblings in _children(key):
        ranks[list(siblings)] = range(len(siblings))
    return ranks
