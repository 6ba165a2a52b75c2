"""Values that pass between the loop and a drafter: a draft's budget and context, the draft, and its verified step.

A draft is a tree, verified in one forward pass by *tree attention*: every node attends only to the whole context, its
ancestors and itself (Token Recycling, section 2.3). Node 0 is the root: the newest token of the sequence, not yet in
the key/value cache. Nodes are in order of depth, so a parent precedes its children, and cutting a draft keeps its first
nodes. A chain has one branch, and a lone root is plain autoregressive decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._util.topk import top_candidates
from ..costs import best_size

if TYPE_CHECKING:
    from .._util.display import Html
    from .._util.text_stream import Decodes
    from ..grammar.state import State

Array = np.ndarray | torch.Tensor | Sequence[int] | Sequence[float]
"""Types accepted for the arrays of a draft."""
_EVERY_NODE = np.ones(4097)
"""Verification times with which every node pays, for up to 4,097 nodes."""


class Tree:
    """Nodes in order of depth; depths, ancestors and children are derived from the parents."""

    parents: np.ndarray
    """(n,) int64: -1 for the root."""
    depths: np.ndarray
    """(n,) int64: 0 for the root."""
    depth: int
    """Depth of the deepest node."""

    def __init__(self, parents: Array) -> None:
        """`parents` (n,), -1 for the root. Raises ValueError unless they form a tree in order of depth."""
        own = vars(self)  # drafts are frozen
        own["parents"] = _on_host(parents, np.int64)
        depths = _depths(self.parents.tolist())
        own["depths"], own["depth"] = np.array(depths), depths[-1]
        if depths != sorted(depths):
            raise ValueError(f"nodes must be in order of depth, got parents {self.parents}; `Draft.of` sorts them")

    def __len__(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """(n, n) bool; row i marks the nodes that node i attends to: its ancestors and itself."""
        rows = [1]  # bit j of row i: node i attends to node j; a row operation is one integer operation
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            rows.append(rows[parent] | 1 << node)
        width = -(-len(rows) // 8)
        packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
        return np.unpackbits(packed.reshape(-1, width), axis=1, count=len(rows), bitorder="little").view(bool)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in order."""
        children: list[list[int]] = [[] for _ in range(len(self))]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            children[parent].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def lineages(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the path from the root to the node, both included."""
        lineages: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents.tolist()[1:], start=1):
            lineages.append((*lineages[parent], node))
        return tuple(lineages)


@dataclass(frozen=True, eq=False, init=False)
class Draft(Tree):
    """The nodes to verify: n parallel arrays on the host, in order of depth. Node 0 is the root, the newest token of
    the sequence. Lists and tensors are converted. Raises ValueError for parents that form no tree in order of depth.
    """

    tokens: np.ndarray
    """(n,) int64."""
    parents: np.ndarray
    """(n,) int64: -1 for the root."""
    probabilities: np.ndarray | None = None
    """(n,) float32: acceptance probability of each node given an accepted parent, used to size drafts. None if unknown.
    """
    sampled_from: Mapping[int, torch.Tensor] | None = None
    """For each sampled node, the distribution (vocabulary,) that the node and its siblings were sampled from, in their
    order and without replacement. Acceptance relies on it: wrong distributions change the output. Sampled nodes must
    not be dropped depending on which tokens were sampled.
    """
    needed: frozenset[int] = frozenset()
    """Nodes that are kept when a draft is pruned, with their ancestors; in a fused draft only if all of them fit."""

    def __init__(
        self,
        tokens: Array,
        parents: Array,
        probabilities: Array | None = None,
        sampled_from: Mapping[int, torch.Tensor] | None = None,
        needed: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(parents)
        own = vars(self)  # frozen: fields are only set here
        own["tokens"] = _on_host(tokens, np.int64)
        own["probabilities"] = None if probabilities is None else _on_host(probabilities, np.float32)
        own["sampled_from"], own["needed"] = sampled_from, needed
        if len(self.tokens) != len(self):
            raise ValueError(f"tokens and parents must have equal lengths, got {len(self.tokens)} and {len(self)}")

    @classmethod
    def chain(cls, tokens: Array, probabilities: Array | None = None) -> Draft:
        """Return a draft with one branch: `tokens` (n,), the root first. With the root alone it is plain decoding."""
        return cls(tokens, branch(len(tokens)), probabilities)

    @classmethod
    def of(
        cls,
        tokens: Array,
        parents: Sequence[int] | np.ndarray,
        probabilities: Array | None = None,
        sampled_from: Mapping[int, torch.Tensor] | None = None,
    ) -> Draft:
        """Return the draft of nodes in any order in which parents precede their children; nodes of equal depth keep
        their order.
        """
        order = np.argsort(_depths(np.asarray(parents).tolist()), kind="stable")
        places = np.full(len(order) + 1, -1)  # the last entry is the root's parent
        places[order] = np.arange(len(order))
        ordered = None if probabilities is None else _on_host(probabilities, np.float32)[order]
        if ordered is not None:
            ordered[0] = 1
        if sampled_from:
            sampled_from = {int(places[node]): source for node, source in sampled_from.items()}
        above = places[np.asarray(parents)[order]]
        return cls(_on_host(tokens, np.int64)[order], above, ordered, sampled_from or None)

    @cached_property
    def ranks(self) -> np.ndarray:
        """(n,) int64: index of every node among its siblings."""
        ranks = np.zeros(len(self), np.int64)
        for siblings in self.children:
            ranks[list(siblings)] = range(len(siblings))
        return ranks

    @cached_property
    def values(self) -> np.ndarray | None:
        """(n,) float64: probability that each node is accepted, the product along its path; None if unknown."""
        if self.probabilities is None:
            return None
        values, parents = np.clip(self.probabilities, 0, 1).astype(np.float64).tolist(), self.parents.tolist()
        values[0] = 1.0
        for node in range(1, len(self)):
            values[node] *= values[parents[node]]
        return np.array(values)

    def cut(self, depth: int) -> Draft:
        """Return the draft without nodes deeper than `depth`."""
        return self.part(range(int(np.searchsorted(self.depths, depth, side="right"))))

    def first_branch(self) -> Draft:
        """Return the draft reduced to the first child of every node."""
        path, children = [0], self.children
        while children[path[-1]]:
            path.append(children[path[-1]][0])
        return self.part(path)

    @property
    def needed_paths(self) -> frozenset[int]:
        """The root, the `needed` nodes and their ancestors."""
        return frozenset({0}).union(*(self.lineages[node] for node in self.needed))

    def ranked(self) -> np.ndarray | None:
        """Return all nodes (n,), those of `needed_paths` first, then by probability. None if probabilities are unknown
        or a sampled node is outside `needed_paths`: the selection must not depend on the sampled tokens.
        """
        if self.values is None:
            return None
        if not self.needed and not self.sampled_from:
            return np.argsort(-self.values, kind="stable")  # a parent comes before its children
        if self.sampled_from and not self.sampled_from.keys() <= self.needed_paths:
            return None
        later = np.ones(len(self), bool)
        later[list(self.needed_paths)] = False
        return np.lexsort((-self.values, later))

    def first_ranked(self, n: int) -> Draft:
        """Return the first n nodes of `ranked`; all nodes if it returns None."""
        order = self.ranked() if len(self) > n else None
        return self if order is None else self.part(sorted(order[:n].tolist()))

    def most_probable(self, n: int) -> Draft:
        """Return the n most probable nodes, the root included; the first n if there are sampled nodes or no
        probabilities.
        """
        order = None if self.sampled_from else self.ranked()
        return self.part(range(min(n, len(self))) if order is None else sorted(order[:n].tolist()))

    def part(self, nodes: Sequence[int]) -> Draft:
        """Return the draft of these nodes (sorted, parents included)."""
        if len(nodes) == len(self):
            return self
        chosen = np.asarray(nodes, np.int64)
        parents = np.searchsorted(chosen, self.parents[chosen])
        parents[0] = -1
        places = {node: place for place, node in enumerate(nodes)}
        sources = {places[node]: source for node, source in (self.sampled_from or {}).items() if node in places}
        return Draft(
            self.tokens[chosen],
            parents,
            None if self.probabilities is None else self.probabilities[chosen],
            sources or None,
            frozenset(places[node] for node in self.needed if node in places),
        )

    def carrying(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes whose path below the root carries `tokens`, ascending; the root for no tokens."""
        drafted, children, nodes = self.tokens.tolist(), self.children, [0]
        for token in tokens:
            nodes = sorted(child for node in nodes for child in children[node] if drafted[child] == token)
        return nodes

    def places_in(self, other: Draft) -> list[int | None]:
        """Return for each node the node of `other` with the same path of tokens, or None; both share the root."""
        there: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(zip(other.parents.tolist(), other.tokens.tolist(), strict=True)):
            there.setdefault((parent, token), node)
        places: list[int | None] = [0]
        for token, parent in zip(self.tokens.tolist()[1:], self.parents.tolist()[1:], strict=True):
            above = places[parent]
            places.append(None if above is None else there.get((above, token)))
        return places


class DraftBuilder:
    """Grows a draft from branches with common prefixes: nodes with the same token after the same parent are merged. A
    `Draft`, by contrast, has complete arrays. Cost: a dictionary entry per node.
    """

    def __init__(self, root: int) -> None:
        """`root` is the root's token."""
        self.tokens, self.parents = [root], [-1]
        self.probabilities: list[float | None] = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, probability: float | None = None) -> int:
        """Return the child of `parent` with `token`, added if missing. Nodes added in order of depth keep their numbers
        in the draft.
        """
        node = self._children.setdefault((parent, token), len(self.parents))
        if node == len(self.parents):
            self.parents.append(parent)
            self.tokens.append(token)
            self.probabilities.append(probability)
        return node

    def draft(self) -> Draft:
        """Return the draft; without probabilities unless those of all nodes are known."""
        probabilities = [probability for probability in self.probabilities if probability is not None]
        return Draft.of(self.tokens, self.parents, probabilities if len(probabilities) == len(self.parents) else None)


def branch(nodes: int) -> np.ndarray:
    """Return the parents (nodes,) int64 of one branch, the root included."""
    return np.arange(-1, nodes - 1)


def star(nodes: int) -> np.ndarray:
    """Return the parents (nodes,) int64 of a root whose children are all other nodes."""
    parents = np.zeros(nodes, np.int64)
    parents[0] = -1
    return parents


def _depths(parents: list[int]) -> list[int]:
    """Return the depths of nodes. Raises ValueError unless parents precede their children."""
    if not parents or parents[0] != -1:
        raise ValueError(f"node 0 must be the root, with parent -1, got parents {parents[:4]}")
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(f"the parent of node {node} must come before it, got {parent}")
        depths.append(depths[parent] + 1)
    return depths


def _on_host(array: Array, dtype: type[np.generic]) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.cpu().numpy()
    return np.ascontiguousarray(array, dtype)


@dataclass(eq=False)
class Budget:
    """Cost limits of one draft, in units of t(1). The loop passes a budget with every context."""

    verifying: np.ndarray = field(default_factory=lambda: _EVERY_NODE)
    """(m,) float64: time of verifying 1, 2, ... nodes."""
    ratio: float = 1.0
    """The forecast ratio, which scales the expected gain of nodes."""
    step: float = 0.0
    node: float = 0.0
    of_pass: float = 0.0
    """Drafting overhead per step, per drafted node and per pass of a draft model."""
    passes: int = 0
    """Passes of draft models so far."""

    @classmethod
    def of_nodes(cls, nodes: int | None) -> Budget:
        """Return the budget of a draft with a given number of nodes, None for any: every node pays."""
        return cls() if nodes is None else cls(np.ones(1 + nodes))

    @property
    def nodes(self) -> int:
        """Maximum number of drafted nodes, the root excluded."""
        return len(self.verifying) - 1

    @property
    def times(self) -> np.ndarray:
        """(m,) float64: time of a step over 1, 2, ... nodes, including drafting and the passes so far."""
        overhead = self.step + self.passes * self.of_pass
        return self.verifying + overhead + self.node * np.arange(len(self.verifying))

    def pays(self, gains: Sequence[float], drafted: Sequence[float] = ()) -> bool:
        """Return whether another pass of a draft model may raise the tokens per time; if so, count it. It adds at most
        one token below each node with the probabilities `gains`; `drafted` are those of the existing nodes.
        """
        if self.nodes < 1:
            return False
        if self.of_pass:
            _, rate = best_size(self.ratio * np.asarray(drafted, np.float64), self.times)
            if self.ratio * sum(gains) <= rate * self.of_pass:
                return False
        self.passes += 1
        return True


@dataclass(frozen=True, eq=False)
class Context:
    """The sequence so far, and everything else a draft may depend on."""

    tokens: torch.Tensor
    """(length,) int64: the sequence so far, prompt included; the last token is the root of the draft."""
    remaining: int
    """Number of tokens that may still be emitted; nodes deeper than `remaining - 1` are useless."""
    warp: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Warps logits (n, vocabulary) for sampling: temperature, top-k and similar, no penalties; None if greedy."""
    state: State | None = None
    """Grammar state at the end of the sequence; None without a grammar, or if unknown."""
    generator: torch.Generator | None = None
    """Random numbers of this sequence's drafts, for drafters that sample; None under greedy decoding."""
    budget: Budget = field(default_factory=Budget)
    """Cost limits of the draft: the number of nodes, and whether one more pass of a draft model pays."""

    @property
    def root(self) -> torch.Tensor:
        """(1,) int64: the newest token."""
        return self.tokens[-1:]


@dataclass(frozen=True, eq=False)
class Step:
    """One verified draft: logits, accepted nodes and emitted tokens, trimmed at the end of the sequence."""

    draft: Draft
    """The verified draft; other drafters may have contributed to it."""
    logits: torch.Tensor
    """(n, vocabulary): the target's logits after every node, rejected ones included."""
    accepted: list[int]
    """Accepted nodes, the root first."""
    tokens: list[int]
    """Emitted tokens, one per accepted node: those of the nodes after the root, then the target's own token."""
    finished: bool
    """Whether this is the last step of the sequence."""
    beyond: int | None = None
    """The first node with the last token of the sequence; this node and its descendants are not learned from."""
    row: int = 0
    """Index of the sequence in the batch."""
    candidates: tuple[np.ndarray, np.ndarray] | None = None
    """The result of `top`, if the device has computed it already."""
    states: torch.Tensor | None = None
    """(n, states * hidden): the hidden states that the drafter's traits request (`states`), concatenated."""
    grammar_states: Sequence[State | None] | None = None
    """Grammar state at every node, None where the grammar forbids the node; None as a whole without a grammar."""

    def top(self, k: int, nodes: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the k most probable tokens after every node, or after `nodes` (n,), and their probabilities: (n, k)
        int32 and float32.
        """
        if self.candidates is None or self.candidates[0].shape[1] < k:
            return top_candidates(self.logits, k, nodes)
        some = slice(None) if nodes is None else nodes
        return self.candidates[0][some, :k], self.candidates[1][some, :k]

    @property
    def learnable(self) -> list[int] | slice:
        """Index of the nodes to learn from: all except those beyond the end of the sequence."""
        if self.beyond is None:
            return slice(None)
        ends = self.draft.carrying(self.tokens)
        return [node for node, lineage in enumerate(self.draft.lineages) if not any(end in lineage for end in ends)]

    def shown(self, tokenizer: Decodes | None = None) -> Html:
        """Render the draft tree and the accepted path for a notebook; token ids without a tokenizer."""
        from .._util import display

        names = [
            str(token) if tokenizer is None else display.visible(tokenizer.decode([token]))
            for token in [*self.draft.tokens.tolist(), self.tokens[-1]]
        ]
        drawing = display.tree(self.draft.parents.tolist(), names[:-1], self.accepted, names[-1])
        summary = f"{len(names) - 2} drafted, {len(self.accepted) - 1} accepted, {len(self.tokens)} emitted"
        return display.Html(f"<div>{summary}: the last one is the model's own</div>{drawing.html}")

    def _repr_html_(self) -> str:
        """Render as `shown` does without a tokenizer."""
        return self.shown()._repr_html_()
