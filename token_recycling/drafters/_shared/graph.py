"""Builds a sequence, a tree or a graph of a draft model's tokens.

Each drafting step is one forward pass over the nodes worth expanding, and gives each of them at most k children: the
most probable tokens, or tokens sampled without replacement. A node stays a leaf if its probability is below
`theta_prob` (probability pruning) or below `theta_sib` times that of its best sibling (sibling pruning), as in
Graph-structured Speculative Decoding (2407.16207, section 4.2); if it can be merged; or if it cannot be among the
verified nodes.

If a path ends with the same tau tokens as an earlier one, its continuation is probably the same too: the node is
*merged*, by an edge to the first node with that ending, and has no children itself (sections 5.2 and 5.3). A merge that
would close a cycle is skipped. For verification the graph is unrolled: below a merged node, the other node's
descendants are copied (section 5.4), the most probable paths first. Without merges the graph is a tree.

The nodes to expand are chosen before their children are sampled, so each set of children has the recorded distribution.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Protocol

import torch

from ..._util.topk import top_candidates
from ...trees.best_first import best_first
from ...trees.draft import Budget, Draft


class Graph:
    """Nodes by number: 0 is the root, the sequence's last token; parents precede their children. A graph becomes a
    `Draft` only when unrolled, since a merged node shares the children of another.
    """

    def __init__(self, sequence: Sequence[int], tau: int = 0) -> None:
        """`sequence` ends with the root's token. `tau`: tokens that must recur for a merge; 0 disables merging."""
        self.tau = tau
        self.tokens = [sequence[-1]]
        self.parents = [-1]
        self.shares = [1.0]
        """Probability of each token after its parent, by the draft model."""
        self.probabilities = [1.0]
        """Probability of the path to each node."""
        self.children: list[list[int]] = [[]]
        self.merged: dict[int, int] = {}
        """For each merged node, the node whose children it shares."""
        self.steps = 0
        """Forward passes of the draft model."""
        self.read: dict[int, int] = {0: 0}
        """Nodes that the draft model has read, with their order of reading."""
        self.sampled_from: dict[int, torch.Tensor] = {}
        """For each node whose children were sampled, the distribution (vocabulary,)."""
        self.copied: frozenset[int] = frozenset()
        """Nodes of the last unrolled tree that are copies."""
        self._grams: list[tuple[int, ...]] = [tuple(sequence[-tau:]) if tau else ()]
        self._first: dict[tuple[int, ...], int] = {}
        self._merged_with: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, tokens: Sequence[int], shares: Sequence[float]) -> list[int]:
        """Add children of a node, each with its probability given that node; return their numbers."""
        added = list(range(len(self), len(self) + len(tokens)))
        for token, share in zip(tokens, shares, strict=True):
            self.tokens.append(token)
            self.parents.append(parent)
            self.shares.append(share)
            self.probabilities.append(self.probabilities[parent] * share)
            self.children.append([])
            self._grams.append((*self._grams[parent], token)[-self.tau :] if self.tau else ())
        self.children[parent] += added
        return added

    def merge(self, node: int) -> bool:
        """Merge a leaf with the first node that has the same ending, if there is one and no cycle results."""
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
        """Return all nodes that `node` can follow, along edges of both kinds."""
        ancestors: set[int] = set()
        waiting = [node]
        while waiting:
            parent = self.parents[waiting.pop()]
            for above in (parent, *self._merged_with.get(parent, ())):
                if above >= 0 and above not in ancestors:
                    ancestors.add(above)
                    waiting.append(above)
        return ancestors

    def follow(self, tokens: Sequence[int]) -> list[tuple[int, bool]]:
        """Return the existing nodes of these tokens below the root, each with whether a merge was crossed."""
        path, node, crossed = [], 0, False
        for token in tokens:
            crossed |= node in self.merged
            following = [child for child in self.successors(node) if self.tokens[child] == token]
            if not following:
                break
            (node,) = following
            path.append((node, crossed))
        return path

    def unrolled(self, nodes: int) -> Draft:
        """Return the tree to verify: the root and up to `nodes` more nodes, the most probable ones. `copied` then
        contains the nodes on another path than the one they were drafted on.

        With sampled tokens, all drafted nodes (at most `nodes`) are verified on their own paths. Copies fill the
        remaining places, and count as deterministic.
        """
        origins, parents, depths, values, crossed = [0], [-1], [0], [1.0], [False]

        def children(place: int) -> Iterator[tuple[float, tuple[int, bool]]]:
            across = crossed[place] or origins[place] in self.merged
            for child in self.successors(origins[place]):
                first = bool(self.sampled_from) and not across
                yield 1.0 if first else values[place] * self.shares[child], (child, across)

        for parent, _, (child, across) in islice(best_first(children), nodes):
            origins.append(child)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            values.append(values[parent] * self.shares[child])
            crossed.append(across)
        order = sorted(range(len(depths)), key=depths.__getitem__)  # the order of the draft
        self.copied = frozenset(place for place, node in enumerate(order) if crossed[node])
        return Draft.of(
            [self.tokens[node] for node in origins],
            parents,
            [self.shares[node] for node in origins],
            {
                place: self.sampled_from[self.parents[node]]
                for place, node in enumerate(origins)
                if not crossed[place] and self.parents[node] in self.sampled_from
            },
        )


Warp = Callable[[torch.Tensor], torch.Tensor]
Stop = Callable[[Graph], bool]
"""Called after the newest nodes were read, before their children are drafted: returns whether drafting ends there."""


@dataclass(frozen=True)
class Rules:
    """Rules for drafting and expanding nodes."""

    depth: int
    """Maximum number of drafting steps."""
    k: int
    """Maximum number of children of a node."""
    nodes: int
    """Maximum number of nodes verified."""
    theta_prob: float = 0.0
    theta_sib: float = 0.0
    tau: int = 0
    """Tokens that must recur for a merge; 0 for a tree."""
    frontier: int | None = None
    """Maximum number of nodes expanded in one step, the most probable ones; None: no limit."""


class LayerReader(Protocol):
    """Reads a sequence and, ahead of it, a tree layer by layer: a whole model or a head."""

    def read(self, sequence: torch.Tensor) -> torch.Tensor:
        """Return logits (1, vocabulary) after `sequence` (length,)."""

    def read_layer(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return logits (n, vocabulary) after n nodes, each below the node read as number `parents[i]`; root: 0."""


def grow(
    reader: LayerReader,
    sequence: torch.Tensor,
    rules: Rules,
    budget: Budget,
    vocabulary: int,
    warp: Warp | None = None,
    stop: Stop | None = None,
    generator: torch.Generator | None = None,
) -> Graph:
    """Draft with the model in `reader` after `sequence` (length,), as long as a pass pays by `budget`; return the
    graph. `reader` has read the expanded nodes.

    Ids are below `vocabulary`, the target's. With `warp`, tokens are sampled with `generator` from the softmax of the
    logits (n, vocabulary) that `warp` computes from the model's. `stop` may end a draft early.
    """
    graph, followed = Graph(sequence[-max(1, rules.tau) :].tolist(), rules.tau), [0]
    if not budget.pays([1.0]):
        return graph
    logits, graph.steps = reader.read(sequence), 1
    for step in range(rules.depth):
        added = _add_children(graph, followed, logits[:, :vocabulary], rules, vocabulary, warp, generator)
        followed = _nodes_to_read(graph, added, rules, warp is not None) if step + 1 < rules.depth else []
        gains = [graph.probabilities[node] for node in followed]
        if not followed or not budget.pays(gains, graph.probabilities[1:]):
            break
        graph.read.update(zip(followed, count(len(graph.read)), strict=False))
        graph.steps += 1
        parents = [graph.read[graph.parents[node]] for node in followed]
        logits = reader.read_layer(parents, [graph.tokens[node] for node in followed])
        if stop is not None and stop(graph):
            break
    return graph


def _add_children(
    graph: Graph,
    parents: Sequence[int],
    logits: torch.Tensor,
    rules: Rules,
    vocabulary: int,
    warp: Warp | None,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Return the children of each parent, from logits (n, vocabulary of the draft model) after them."""
    k = min(rules.k, rules.nodes, logits.shape[1])
    if warp is None:
        return list(map(graph.add, parents, *(array.tolist() for array in top_candidates(logits, k))))
    fitted = torch.nn.functional.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    probabilities = torch.softmax(warp(fitted), dim=-1)
    tokens = draw(probabilities, k, generator)
    shares = probabilities.gather(1, tokens)
    added = []
    for row, (parent, chosen, likely) in enumerate(zip(parents, tokens.tolist(), shares.tolist(), strict=True)):
        possible = [place for place, share in enumerate(likely) if share > 0]
        graph.sampled_from[parent] = probabilities[row]
        added.append(graph.add(parent, [chosen[place] for place in possible], [likely[place] for place in possible]))
    return added


def draw(probabilities: torch.Tensor, k: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return (n, k) ids sampled without replacement from each row of (n, vocabulary), improbable ones last.

    These are the first k of a race: each id arrives after an exponential time whose rate is its probability.
    """
    device = probabilities.device
    if generator is not None:
        probabilities = probabilities.to(generator.device)  # a draft model may be on another device than the target
    times = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / times).topk(k).indices.to(device)


def _nodes_to_read(graph: Graph, added: Sequence[Sequence[int]], rules: Rules, sampled: bool) -> list[int]:
    """Return the nodes to read next, most probable first: neither pruned nor merged, as many as can matter."""
    candidates = []
    for siblings in added:
        best = max((graph.shares[node] for node in siblings), default=0.0)
        least = max(rules.theta_prob, rules.theta_sib * best)
        candidates += [node for node in siblings if graph.shares[node] >= least]
    candidates.sort(key=lambda node: -graph.probabilities[node])
    if sampled:
        # All children are verified: expand only as many nodes as leave space for their children.
        room = (rules.nodes - (len(graph) - 1)) // min(rules.k, rules.nodes)
    else:
        # A child is less probable than its parent: it is verified only if its parent is not the last verified node.
        most = heapq.nlargest(rules.nodes - 1, graph.probabilities[1:])
        candidates = [node for node in candidates if most and graph.probabilities[node] >= most[-1]]
        room = len(candidates) if rules.frontier is None else rules.frontier
    followed: list[int] = []
    for node in candidates:
        if len(followed) >= room:
            break
        if not graph.merge(node):
            followed.append(node)
    return followed
