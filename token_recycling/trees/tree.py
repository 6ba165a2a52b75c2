"""The shape of a draft: which node follows which, and what each may see.

A draft tree is verified in one forward pass by *tree attention*: every node sees the whole context and its own
ancestors, nothing else (Token Recycling, section 2.3). A `Tree` is that shape without the tokens, so one object serves
every step and its tensors are made once. Node 0 is the root: the newest token of the sequence, not yet in the key/value
cache. A chain is a tree with one branch, and a lone root is plain autoregressive decoding.

A template names each node by its *path of ranks* from the root: `(0, 2)` is the third candidate after the best
candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import torch

from .._util import display

RankPath = tuple[int, ...]


class TreeTensors(NamedTuple):
    """A tree's arrays on one device; n nodes."""

    parents: torch.Tensor
    """(n,) int64; the root is its own parent."""
    ranks: torch.Tensor
    """(n,) int64."""
    depths: torch.Tensor
    """(n,) int64; the root has depth 0."""
    ancestors: torch.Tensor
    """(n, n) bool; row i marks the nodes that node i sees: its ancestors and itself."""


@dataclass(frozen=True, eq=False)
class Tree:
    """Parents and ranks of n nodes, in order of depth; `parents[0]` is -1, rank 0 the best candidate of the parent.
    Trees are compared by identity; make a template once, since its arrays stay with it.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    _tensors: dict[torch.device, TreeTensors] = field(default_factory=dict, init=False, repr=False)
    _cuts: dict[int, Tree] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError(f"node 0 must be the root, with parent -1, got parents {self.parents[:4]}")
        if len(self.parents) != len(self.ranks):
            raise ValueError(f"parents and ranks must be equally many, got {len(self.parents)} and {len(self.ranks)}")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"the parent of node {node} must come before it, got {parent}")
        if list(self.depths) != sorted(self.depths):
            raise ValueError(f"nodes must be in order of depth, got depths {self.depths}")

    def __reduce__(self) -> tuple[type[Tree], tuple[tuple[int, ...], tuple[int, ...]]]:
        """Pickle and copy the shape alone: its tensors may be on a device that is not there where it is read."""
        return type(self), (self.parents, self.ranks)

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    def __repr__(self) -> str:
        return f"Tree({len(self) - 1} nodes + root, layers {' '.join(map(str, self.layer_sizes)) or '-'})"

    @classmethod
    def from_paths(cls, paths: Iterable[RankPath]) -> Tree:
        """A template from rank paths, in the order given within each layer; the root may be left out. Raises ValueError
        for a path whose parent is missing, a path given twice, or a negative rank.
        """
        ordered = sorted((path for path in paths if path), key=len)
        index: dict[RankPath, int] = {(): 0}
        parents, ranks = [-1], [0]
        for path in ordered:
            if path in index:
                raise ValueError(f"paths must be unique, got {path} twice")
            if path[:-1] not in index:
                raise ValueError(f"the parent {path[:-1]} of path {path} is missing; add it")
            if path[-1] < 0:
                raise ValueError(f"ranks must be >= 0, got path {path}")
            index[path] = len(parents)
            parents.append(index[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.depths)

    @cached_property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """The nodes of each depth below the root."""
        return tuple(
            tuple(node for node, at in enumerate(self.depths) if at == depth) for depth in range(1, self.depth + 1)
        )

    @property
    def layer_sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.layers))

    @property
    def breadth(self) -> int:
        """Number of candidates a drafter must offer after each token: the highest rank plus one."""
        return max(self.ranks[1:], default=-1) + 1

    @cached_property
    def paths(self) -> tuple[RankPath, ...]:
        """Every node as its rank path."""
        paths: list[RankPath] = [()]
        for node in range(1, len(self)):
            paths.append((*paths[self.parents[node]], self.ranks[node]))
        return tuple(paths)

    @cached_property
    def lineages(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes from the root down to it, both included."""
        lineages: list[tuple[int, ...]] = [(0,)]
        for node in range(1, len(self)):
            lineages.append((*lineages[self.parents[node]], node))
        return tuple(lineages)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each node its children, in order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    def below(self, node: int) -> list[int]:
        """`node` and all its descendants."""
        return [other for other, lineage in enumerate(self.lineages) if node in lineage]

    def cut(self, depth: int) -> Tree:
        """This tree without the nodes deeper than `depth`; made once for each depth."""
        if depth >= self.depth:
            return self
        if depth not in self._cuts:
            kept = sum(at <= depth for at in self.depths)
            self._cuts[depth] = Tree(self.parents[:kept], self.ranks[:kept])
        return self._cuts[depth]

    def on(self, device: torch.device) -> TreeTensors:
        """The tree's arrays on `device`, made once, for use in inference mode and outside."""
        if device not in self._tensors:
            numbers = np.array([(0, *self.parents[1:]), self.ranks, self.depths])
            seen = np.eye(len(self), dtype=bool)
            for node, parent in enumerate(self.parents[1:], start=1):
                seen[node] |= seen[parent]
            with torch.inference_mode(False):
                parents, ranks, depths = torch.from_numpy(numbers).to(device)
                self._tensors[device] = TreeTensors(parents, ranks, depths, torch.from_numpy(seen).to(device))
        return self._tensors[device]

    def drawn(self, labels: Sequence[str] | None = None) -> str:
        """The tree as text, a node a line; `labels` replace the ranks."""
        texts = list(labels) if labels is not None else ["root", *map(str, self.ranks[1:])]
        lines = [texts[0]]

        def draw(node: int, indent: str) -> None:
            for child in self.children[node]:
                last = child == self.children[node][-1]
                lines.append(f"{indent}{'└─ ' if last else '├─ '}{texts[child]}")
                draw(child, indent + ("   " if last else "│  "))

        draw(0, "")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """In a notebook: every node with its rank."""
        return display.tree(self.parents, ["root", *map(str, self.ranks[1:])])._repr_html_()


@cache
def branch(nodes: int) -> Tree:
    """The tree of one branch, the root included; made once, so that its mask is too."""
    return Tree((*range(-1, nodes - 1),), (0,) * nodes)


def shape(parents: Sequence[int], ranks: Sequence[int]) -> Tree:
    """Return the tree of these nodes, for one branch always the same object."""
    if any(ranks) or list(parents) != [*range(-1, len(parents) - 1)]:
        return Tree(tuple(parents), tuple(ranks))
    return branch(len(parents))


def by_depth(parents: Sequence[int]) -> list[int]:
    """Return nodes in order of depth, those of one depth as they come; every parent comes before its children."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return sorted(range(len(parents)), key=depths.__getitem__)
