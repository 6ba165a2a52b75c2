"""Drafted tokens as a directed acyclic graph, and the tree that is verified in its place.

Nodes are drafted below a root, layer by layer, as in a tree. Where a path ends with the same tau tokens as an earlier
one, what follows is likely the same too: the node is *merged*, by an edge to the first node of that kind, and has no
children of its own (Graph-structured Speculative Decoding, 2407.16207, sections 5.2 and 5.3). A merge that would close
a cycle is not made. For verification the graph is unrolled: below a merged node stand copies of what follows the other
one (section 5.4), the most probable paths first. Without merges the graph is a tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from ...trees.best_first import best_first
from ...trees.draft import Draft
from ...trees.tree import by_depth


class Graph:
    """Nodes by number: 0 is the root, the text's last token; parents come before their children."""

    def __init__(self, text: Sequence[int], tau: int = 0) -> None:
        """`text` ends with the root's token. `tau` is the length of what must recur for a merge; 0 for none."""
        self.tau = tau
        self.tokens = [text[-1]]
        self.parents = [-1]
        self.ranks = [0]
        self.shares = [1.0]
        """Probability of each token after its parent, by the draft model."""
        self.probabilities = [1.0]
        """Of the path to each node."""
        self.children: list[list[int]] = [[]]
        self.merged: dict[int, int] = {}
        """For each merged node the one whose successors it has."""
        self.steps = 1
        """Forward passes of the draft model."""
        self.read: dict[int, int] = {0: 0}
        """The nodes that the draft model has read, each with its number in their order."""
        self.drawn_from: dict[int, torch.Tensor] = {}
        """For each node whose children were drawn at random, the distribution (vocabulary,)."""
        self.copied: frozenset[int] = frozenset()
        """Nodes of the last unrolled tree that are copies."""
        self._grams: list[tuple[int, ...]] = [tuple(text[-tau:]) if tau else ()]
        self._first: dict[tuple[int, ...], int] = {}
        self._merged_with: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], shares: Sequence[float]) -> list[int]:
        """Children of a node, each with its probability after that node; their numbers."""
        added = list(range(len(self), len(self) + len(tokens)))
        for rank, (token, share) in enumerate(zip(tokens, shares, strict=True)):
            self.tokens.append(token)
            self.parents.append(parent)
            self.ranks.append(rank)
            self.shares.append(share)
            self.probabilities.append(self.probabilities[parent] * share)
            self.children.append([])
            self._grams.append((*self._grams[parent], token)[-self.tau :] if self.tau else ())
        self.children[parent] += added
        return added

    def merge(self, node: int) -> bool:
        """Merges a node without children with the first that ends alike, if there is one and no cycle arises."""
        if not self.tau or len(self._grams[node]) < self.tau:
            return False
        first = self._first.setdefault(self._grams[node], node)
        if first == node or first in self._above(node):
            return False
        self.merged[node] = first
        self._merged_with.setdefault(first, []).append(node)
        return True

    def successors(self, node: int) -> list[int]:
        return self.children[self.merged.get(node, node)]

    def _above(self, node: int) -> set[int]:
        """All nodes that `node` can follow, along edges of both kinds."""
        found: set[int] = set()
        waiting = [node]
        while waiting:
            parent = self.parents[waiting.pop()]
            for above in (parent, *self._merged_with.get(parent, ())):
                if above >= 0 and above not in found:
                    found.add(above)
                    waiting.append(above)
        return found

    def follow(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """The nodes of these tokens below the root, as far as there are any; with each, whether a merge was crossed."""
        path, node, crossed = [], 0, False
        for token in tokens:
            crossed |= node in self.merged
            following = [child for child in self.successors(node) if self.tokens[child] == token]
            if not following:
                break
            (node,) = following
            path.append((node, crossed))
        return path

    def unrolled(self, nodes: int, device: torch.device | str = "cpu") -> Draft:
        """The tree that is verified: the root and at most `nodes` more, the most probable ones. `copied` then names
        those that stand on another path than the one that they were drafted on.

        Of a graph whose tokens were sampled all nodes stand on their own paths, of which no more than `nodes` may have
        been drafted; copies fill up the rest, and count as chosen.
        """
        origins, parents, values, crossed = [0], [-1], [1.0], [False]

        def children(place: int) -> Iterator[tuple[float, tuple[int, bool]]]:
            across = crossed[place] or origins[place] in self.merged
            for child in self.successors(origins[place]):
                first = bool(self.drawn_from) and not across
                yield 1.0 if first else values[place] * self.shares[child], (child, across)

        for parent, _, (child, across) in islice(best_first(children), nodes):
            origins.append(child)
            parents.append(parent)
            values.append(values[parent] * self.shares[child])
            crossed.append(across)
        self.copied = frozenset(place for place, node in enumerate(by_depth(parents)) if crossed[node])
        return Draft.of(
            parents,
            [self.tokens[node] for node in origins],
            [self.shares[node] for node in origins],
            ranks=[self.ranks[node] for node in origins],
            drawn_from={
                place: self.drawn_from[self.parents[node]]
                for place, node in enumerate(origins)
                if not crossed[place] and self.parents[node] in self.drawn_from
            },
            device=device,
        )
