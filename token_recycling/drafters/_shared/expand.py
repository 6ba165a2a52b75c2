"""Builds a sequence, a tree or a graph of a draft model's tokens.

Each drafting step is one forward pass over the nodes worth following, and gives each of them at most k children: the
most likely tokens, or tokens drawn without replacement. A node is left as a leaf if its probability is below
`theta_prob` (probability pruning) or below `theta_sib` times that of its best sibling (sibling pruning), as in
Graph-structured Speculative Decoding (2407.16207, section 4.2); if it can be merged (`graph`); or if it cannot be among
the nodes that are verified.

Which nodes are followed is decided before their children are drawn: each set has the distribution noted with it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

import numpy as np
import torch

from ...costs.budget import step_pays
from ...costs.costs import Work
from ...trees.draft import Draft
from .._pruning import prune
from .graph import Graph

Warp = Callable[[torch.Tensor], torch.Tensor]
Stop = Callable[[Graph], bool]
"""Called once the newest nodes were read, before anything is drafted below them: whether drafting ends there."""


@dataclass(frozen=True)
class Rules:
    """Which nodes are drafted and followed."""

    depth: int
    """Drafting steps at most."""
    k: int
    """Children of a node at most."""
    nodes: int
    """Nodes that are verified, at most."""
    theta_prob: float = 0.0
    theta_sib: float = 0.0
    tau: int = 0
    """Tokens that must recur for a merge; 0 for a tree."""
    frontier: int | None = None
    """Nodes that are followed in one step at most, the most probable ones; None: all that are worth it."""
    times: np.ndarray | None = None
    """(nodes + 1,) t(n) of the target's passes over 1, 2, ... nodes. Where given, drafting ends where one more step
    does not pay, and only as many nodes are verified as do.
    """
    work: Work = field(default_factory=Work)
    """What a drafting step takes, in the same unit."""


class LayerReader(Protocol):
    """Reads a text and, ahead of it, a tree layer by layer: a whole model or a head."""

    def read(self, text: torch.Tensor) -> torch.Tensor:
        """Logits (1, vocabulary) after `text` (length,)."""

    def read_layer(self, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Logits (n, vocabulary) after n nodes, each below the one read as number `parents[i]`; the root is 0."""


def grow(
    reader: LayerReader,
    text: torch.Tensor,
    rules: Rules,
    vocabulary: int,
    warp: Warp | None = None,
    stop: Stop | None = None,
    generator: torch.Generator | None = None,
) -> Graph:
    """What the model in `reader` drafts after `text` (length,), and in `reader` the nodes that were followed.

    Ids are below `vocabulary`, the target's. With `warp` tokens are drawn, from the softmax of the logits (n,
    vocabulary) that it makes of the model's, and from `generator`. `stop` may end a draft by what was read of it.
    """
    graph, followed = Graph(text[-max(1, rules.tau) :].tolist(), rules.tau), [0]
    logits = reader.read(text)
    for step in range(rules.depth):
        added = _add_children(graph, followed, logits[:, :vocabulary], rules, vocabulary, warp, generator)
        followed = _worth_following(graph, added, rules, warp is not None) if step + 1 < rules.depth else []
        if not followed or not _pays(graph, followed, rules):
            break
        graph.read.update(zip(followed, count(len(graph.read)), strict=False))
        graph.steps += 1
        parents = [graph.read[graph.parents[node]] for node in followed]
        logits = reader.read_layer(parents, [graph.tokens[node] for node in followed])
        if stop is not None and stop(graph):
            break
    return graph


def verified(graph: Graph, rules: Rules, device: torch.device | str = "cpu") -> Draft:
    """The draft that is verified in the graph's place."""
    draft = graph.unrolled(rules.nodes, device)
    if rules.times is None:
        return draft
    return prune([draft], rules.times + graph.steps * rules.work.step)[0]


def _pays(graph: Graph, followed: Sequence[int], rules: Rules) -> bool:
    if rules.times is None:
        return True
    gains = [graph.probabilities[node] for node in followed]
    return step_pays(gains, graph.probabilities[1:], rules.times + graph.steps * rules.work.step, rules.work.step)


def _add_children(
    graph: Graph,
    parents: Sequence[int],
    logits: torch.Tensor,
    rules: Rules,
    vocabulary: int,
    warp: Warp | None,
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Children of each parent, from logits (n, vocabulary of the draft model) after them."""
    k = min(rules.k, rules.nodes, logits.shape[1])
    if warp is None:
        shares, tokens = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(k)
        return list(map(graph.add, parents, tokens.tolist(), shares.tolist()))
    fitted = torch.nn.functional.pad(logits, (0, vocabulary - logits.shape[1]), value=float("-inf"))
    probabilities = torch.softmax(warp(fitted), dim=-1)
    tokens = draw(probabilities, k, generator)
    shares = probabilities.gather(1, tokens)
    added = []
    for row, (parent, chosen, likely) in enumerate(zip(parents, tokens.tolist(), shares.tolist(), strict=True)):
        possible = [place for place, share in enumerate(likely) if share > 0]
        graph.drawn_from[parent] = probabilities[row]
        added.append(graph.add(parent, [chosen[place] for place in possible], [likely[place] for place in possible]))
    return added


def draw(probabilities: torch.Tensor, k: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """(n, k) ids drawn one after another without replacement from each row of (n, vocabulary), improbable ones last.

    The first k of a race: each id arrives after an exponential time whose rate is its probability.
    """
    device = probabilities.device
    if generator is not None:
        probabilities = probabilities.to(generator.device)  # a draft model may be on another device than the target
    times = torch.empty_like(probabilities).exponential_(generator=generator)
    return (probabilities / times).topk(k).indices.to(device)


def _worth_following(graph: Graph, added: Sequence[Sequence[int]], rules: Rules, drawn: bool) -> list[int]:
    """The nodes to read next, most probable first: neither pruned nor merged, as many as can matter."""
    kept = []
    for siblings in added:
        best = max((graph.shares[node] for node in siblings), default=0.0)
        least = max(rules.theta_prob, rules.theta_sib * best)
        kept += [node for node in siblings if graph.shares[node] >= least]
    kept.sort(key=lambda node: -graph.probabilities[node])
    if drawn:
        # All children are verified, whatever they are: only as many nodes are followed as there is room for theirs.
        room = (rules.nodes - (len(graph) - 1)) // min(rules.k, rules.nodes)
    else:
        # A child is less probable than its parent: it is verified only if the parent is not the last that is.
        most = heapq.nlargest(rules.nodes - 1, graph.probabilities[1:])
        kept = [node for node in kept if most and graph.probabilities[node] >= most[-1]]
        room = len(kept) if rules.frontier is None else rules.frontier
    followed: list[int] = []
    for node in kept:
        if len(followed) >= room:
            break
        if not graph.merge(node):
            followed.append(node)
    return followed
