"""Values that pass between the loop and a drafter: the context of a draft, the draft, the step that verified it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from .._util import display
from .._util.text_stream import Decodes
from .._util.topk import top_candidates
from .tree import Tree, by_depth, shape

if TYPE_CHECKING:
    from ..grammar.state import State


@dataclass(frozen=True, eq=False)
class Draft:
    """A tree and its tokens (n,) int64, on any device; `tokens[0]` is the root, the newest token of the sequence."""

    tree: Tree
    tokens: torch.Tensor
    sampled_from: Mapping[int, torch.Tensor] | None = None
    """For each sampled node the distribution (vocabulary,) that it and its siblings were sampled from, without
    replacement and in their order. Acceptance relies on it: wrong distributions change the output. No sampled node may
    be left out because of the tokens that were sampled.
    """
    confidence: np.ndarray | None = None
    """(n,) float32: the chance of each node if its parent is accepted; sequences share passes by it."""
    needed: frozenset[int] = frozenset()
    """Nodes that the drafter learns from even if rejected; kept in a fused draft if all of them fit."""

    @classmethod
    def of(
        cls,
        parents: Sequence[int],
        tokens: Sequence[int] | np.ndarray,
        confidence: Sequence[float] | np.ndarray | None = None,
        *,
        ranks: Sequence[int] | None = None,
        sampled_from: Mapping[int, torch.Tensor] | None = None,
        device: torch.device | str = "cpu",
    ) -> Draft:
        """Make a draft of three parallel arrays (n,), the root first, every parent before its children; nodes are put
        in order of depth. Ranks are places among siblings unless they are given.
        """
        order = by_depth(parents)
        places = {node: place for place, node in enumerate(order)}
        above = [-1, *(places[parents[node]] for node in order[1:])]
        if ranks is None:
            degrees = [0] * len(order)
            ordered = [0]
            for parent in above[1:]:
                ordered.append(degrees[parent])
                degrees[parent] += 1
        else:
            ordered = [ranks[node] for node in order]
        known = None if confidence is None else np.asarray(confidence, np.float32)[order]
        if known is not None:
            known[0] = 1
        return cls(
            shape(above, ordered),
            torch.from_numpy(np.asarray(tokens, np.int64)[order]).to(device),
            {places[node]: source for node, source in sampled_from.items()} if sampled_from else None,
            known,
        )

    def cut(self, depth: int) -> Draft:
        """Return the draft without nodes deeper than `depth`."""
        tree = self.tree.cut(depth)
        if tree is self.tree:
            return self
        sampled_from = self.sampled_from and {node: q for node, q in self.sampled_from.items() if node < len(tree)}
        confidence = None if self.confidence is None else self.confidence[: len(tree)]
        needed = frozenset(node for node in self.needed if node < len(tree))
        return Draft(tree, self.tokens[: len(tree)], sampled_from, confidence, needed)

    def chain(self) -> Draft:
        """Return the first branch: of every node only the first child."""
        path, tree = [0], self.tree
        while tree.children[path[-1]]:
            path.append(tree.children[path[-1]][0])
        return self.part(path)

    def ranked(self, kept: frozenset[int] = frozenset({0})) -> np.ndarray | None:
        """Return all nodes (n,), those of `kept` first, then the most probable ones; None where probabilities are
        unknown, or sampled nodes are not among `kept`: which of these stay must not depend on what was sampled.
        """
        if self.probabilities is None or (self.sampled_from and not self.sampled_from.keys() <= kept):
            return None
        later = np.ones(len(self.tree), bool)
        later[list(kept)] = False
        return np.lexsort((-self.probabilities, later))  # stable: a parent comes before its children

    def most_probable(self, n: int) -> Draft:
        """Sub-draft of the n most probable nodes, the root included; of the first n where `ranked` returns None."""
        order = self.ranked()
        return self.part(range(min(n, len(self.tree))) if order is None else sorted(order[:n].tolist()))

    def part(self, nodes: Sequence[int]) -> Draft:
        """Sub-draft of these nodes (sorted, with their parents)."""
        if len(nodes) == len(self.tree):
            return self
        places = {node: place for place, node in enumerate(nodes)}
        kept, tree = list(places), self.tree
        parents = [-1 if node == 0 else places[tree.parents[node]] for node in kept]
        sources = {places[node]: q for node, q in (self.sampled_from or {}).items() if node in places}
        confidence = None if self.confidence is None else self.confidence[kept]
        needed = frozenset(places[node] for node in self.needed if node in places)
        return Draft(
            shape(parents, [tree.ranks[node] for node in kept]), self.tokens[kept], sources or None, confidence, needed
        )

    @cached_property
    def probabilities(self) -> np.ndarray | None:
        """(n,) float64: acceptance probability of each node, never rising from parent to child; None if unknown."""
        if self.confidence is None:
            return None
        probabilities = np.ones(len(self.tree))
        for node, parent in enumerate(self.tree.parents[1:], start=1):
            probabilities[node] = probabilities[parent] * min(1.0, max(0.0, float(self.confidence[node])))
        return probabilities

    def carrying(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes that carry `tokens` one after another below the root, ascending; the root for no tokens."""
        drafted, nodes = self.tokens.tolist(), [0]
        for token in tokens:
            nodes = sorted(child for node in nodes for child in self.tree.children[node] if drafted[child] == token)
        return nodes

    def places_in(self, other: Draft) -> list[int | None]:
        """Return for each node the one of `other` after the same tokens, or None; both share the root."""
        there: dict[tuple[int, int], int] = {}
        for node, token in enumerate(other.tokens.tolist()):
            there.setdefault((other.tree.parents[node], token), node)
        places: list[int | None] = [0]
        for token, parent in zip(self.tokens.tolist()[1:], self.tree.parents[1:], strict=True):
            above = places[parent]
            places.append(None if above is None else there.get((above, token)))
        return places


class DraftBuilder:
    """Grows a draft from branches with common prefixes: nodes with the same token after the same parent are merged.
    Cost: a dictionary entry per node.
    """

    def __init__(self, root: int) -> None:
        """`root` is the root's token."""
        self.parents, self.tokens = [-1], [root]
        self.confidence: list[float | None] = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int, confidence: float | None = None) -> int:
        """Return the child of `parent` that carries `token`, which may be new. Nodes that are added in order of depth
        have the same numbers in the draft.
        """
        node = self._children.setdefault((parent, token), len(self.parents))
        if node == len(self.parents):
            self.parents.append(parent)
            self.tokens.append(token)
            self.confidence.append(confidence)
        return node

    def draft(self, device: torch.device | str = "cpu") -> Draft:
        """Return what was added; without confidence unless it is known of all nodes."""
        known = [one for one in self.confidence if one is not None]
        return Draft.of(self.parents, self.tokens, known if len(known) == len(self.parents) else None, device=device)


@dataclass(frozen=True, eq=False)
class Context:
    """The sequence so far, and everything else a draft may depend on."""

    tokens: torch.Tensor
    """(length,) int64: the sequence so far, prompt included; the last token is the root of the draft."""
    remaining: int
    """Number of tokens that may still be emitted; nodes deeper than `remaining - 1` are useless."""
    warp: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Warps logits (n, vocabulary) for sampling: temperature, top-k and the like, no penalties; None if greedy."""
    state: State | None = None
    """Grammar state at the end of the sequence; None without a grammar, or where it is unknown."""
    generator: torch.Generator | None = None
    """Random numbers of this sequence's drafts, for drafters that sample; None where nothing is sampled."""

    @property
    def root(self) -> torch.Tensor:
        """(1,) int64: the newest token."""
        return self.tokens[-1:]


@dataclass(frozen=True, eq=False)
class Step:
    """One verified draft: logits, accepted nodes and emitted tokens, trimmed at the end of the sequence."""

    draft: Draft
    """The verified draft; other drafters may have a part in it."""
    logits: torch.Tensor
    """(n, vocabulary): the target's logits after every node, the rejected ones too."""
    accepted: list[int]
    """Accepted nodes, the root first."""
    tokens: list[int]
    """Emitted tokens, one per accepted node: those of the accepted nodes after the root, then the last one."""
    finished: bool
    """True for the last step of a sequence."""
    beyond: int | None = None
    """The first node that carries the last token of the sequence; it and its descendants are not learned from."""
    row: int = 0
    """Which sequence of a batch it is, counted from 0."""
    candidates: tuple[np.ndarray, np.ndarray] | None = None
    """The result of `top`, where the device has found it already."""
    states: torch.Tensor | None = None
    """(n, states * hidden): the hidden states that the drafter's traits name (`states`), side by side."""

    def top(self, k: int, nodes: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the k most probable tokens after every node, or `nodes` (n,), and their probabilities: (n, k) int32,
        float32.
        """
        if self.candidates is None or self.candidates[0].shape[1] < k:
            return top_candidates(self.logits, k, nodes)
        some = slice(None) if nodes is None else nodes
        return self.candidates[0][some, :k], self.candidates[1][some, :k]

    @property
    def learnable(self) -> list[int] | slice:
        """Index of the nodes to learn from: all, without those beyond the end of the sequence."""
        if self.beyond is None:
            return slice(None)
        ends = self.draft.carrying(self.tokens)
        beyond = {node for end in ends for node in self.draft.tree.below(end)}
        return [node for node in range(len(self.draft.tree)) if node not in beyond]

    def shown(self, tokenizer: Decodes | None = None) -> display.Html:
        """Show the draft tree and the accepted path in a notebook; token ids without a tokenizer."""
        names = [
            str(token) if tokenizer is None else display.visible(tokenizer.decode([token]))
            for token in [*self.draft.tokens.tolist(), self.tokens[-1]]
        ]
        drawing = display.tree(self.draft.tree.parents, names[:-1], self.accepted, names[-1])
        said = f"{len(names) - 2} drafted, {len(self.accepted) - 1} accepted, {len(self.tokens)} emitted"
        return display.Html(f"<div>{said}: the last one is the model's own</div>{drawing.html}")

    def _repr_html_(self) -> str:
        """In a notebook: as `shown` without a tokenizer."""
        return self.shown()._repr_html_()
