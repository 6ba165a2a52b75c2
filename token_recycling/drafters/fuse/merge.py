"""Several drafts of one text as one tree: merged, valued by what was accepted before, and the best nodes kept.

Nodes of one token after the same tokens are one node, with a rank and a confidence of each drafter that proposes it.
What one drafter proposes is calibrated by its confidence, rank and depth; the mean of several is calibrated again, by
which of them propose the token, which propose others and which nothing: what they agree on is right far more often. A
node's value is the product of the chances from the root: the nodes of the highest values are the best tree of their
number (Sequoia, 2402.12374, section 4.1).

Drawn drafts (`Draft.drawn_from`) stay exact: of one drafter that draws, whole layers are kept, as many as there is room
for; how many nodes a layer has depends on what was drawn above it, never in it. What is drawn deeper, or by another
drafter, counts as chosen, and may be left out for any reason.

Cost per step: about a microsecond a node in Python, less than that in compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from ..._util.compiled import compiled
from ...costs.budget import paying_nodes
from ...recycling.calibration import CELLS, cell_of, chance, count, match_kind, new_calibration
from ...recycling.trie import Trie
from ...trees.draft import Context, Draft
from ...trees.templates import chain
from ...trees.tree import Tree

_UNSURE = 0.5
"""Confidence in the best candidate of a drafter that states none; each further one is taken for half as good."""


class MergedNodes(NamedTuple):
    """The nodes of p drafts, each path once, in order of depth; n nodes, the root included."""

    parents: np.ndarray
    """(n,) int64; -1 for the root."""
    tokens: np.ndarray
    """(n,) int64."""
    depths: np.ndarray
    """(n,) int64."""
    ranks: np.ndarray
    """(n, p) int64: the node's rank in each draft, -1 where it is not proposed."""
    confidences: np.ndarray
    """(n, p) float32: how likely each drafter thinks the node after its parent."""


class MergedDraft(NamedTuple):
    """Several drafts in one tree."""

    nodes: MergedNodes
    drawn_from: Mapping[int, torch.Tensor]
    """Of one draft: see `Draft.drawn_from`."""
    needed: Sequence[Sequence[int]]
    """(p): see `Draft.needed`."""

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """The nodes that carry these tokens, one after another below the root, as far as there are any."""
        path, at = [], 0
        for token in tokens:
            (found,) = ((self.nodes.parents == at) & (self.nodes.tokens == token)).nonzero()
            if not len(found):
                break
            at = int(found[0])
            path.append(at)
        return path

    def draft(self, kept: np.ndarray, drawn: frozenset[int], context: Context, values: np.ndarray) -> Draft:
        """Return the draft of the nodes `kept` (m,), ascending, with all their ancestors; of those, `drawn` count as
        drawn. `values` (n,) are the acceptance probabilities of all nodes.
        """
        places = np.full(len(self.nodes.parents), -1, np.int64)
        places[kept] = np.arange(len(kept))
        parents = places[self.nodes.parents[kept[1:]]].tolist()
        ranks, degrees = [0], [0] * len(kept)
        for parent in parents:
            ranks.append(degrees[parent])
            degrees[parent] += 1
        tokens = torch.from_numpy(self.nodes.tokens[kept]).to(context.tokens.device)
        drawn_from = {int(places[node]): self.drawn_from[node] for node in drawn}
        confidence = np.ones(len(kept), np.float32)
        above = values[kept][parents]
        confidence[1:] = np.divide(values[kept[1:]], above, out=np.zeros(len(parents)), where=above > 0)
        return Draft(Tree((-1, *parents), tuple(ranks)), tokens, drawn_from or None, confidence)


def merge_drafts(drafts: Sequence[Draft]) -> MergedDraft:
    """All nodes of drafts with one root. Of the drafts with drawn nodes the first keeps them as such."""
    drawing = next((part for part, draft in enumerate(drafts) if draft.drawn_from), 0)
    # Its nodes come first in every layer, so that drawn siblings stay in the order in which they were drawn.
    order = sorted(range(len(drafts)), key=lambda part: part != drawing)
    tokens = [draft.tokens.tolist() for draft in drafts]
    trie, places = Trie(tokens[0][0]), [[0] for _ in drafts]
    for depth in range(1, max(draft.tree.depth for draft in drafts) + 1):
        for part in order:
            tree, here = drafts[part].tree, places[part]
            while len(here) < len(tree) and tree.depths[len(here)] == depth:
                here.append(trie.add(here[tree.parents[len(here)]], tokens[part][len(here)]))
    parents = np.array(trie.parents)
    depths, ranks = np.zeros_like(parents), np.full((len(parents), len(drafts)), -1, np.int64)
    confidences = np.zeros(ranks.shape, np.float32)
    for part, draft in enumerate(drafts):
        # Backwards, since of two equal siblings the first is the one that is followed.
        nodes, given = np.array(places[part])[::-1], np.array(draft.tree.ranks)[::-1]
        ranks[nodes, part], depths[nodes] = given, np.array(draft.tree.depths)[::-1]
        stated = _UNSURE ** (given + 1.0) if draft.confidence is None else np.clip(draft.confidence[::-1], 0, 1)
        confidences[nodes, part] = stated
    drawn = drafts[drawing].drawn_from or {}
    return MergedDraft(
        MergedNodes(parents, np.array(trie.tokens), depths, ranks, confidences),
        {places[drawing][node]: source for node, source in drawn.items()},
        [[here[node] for node in draft.needed] for draft, here in zip(drafts, places, strict=True)],
    )


class NodeValues(NamedTuple):
    """How likely n nodes are to be accepted, and by which kinds of candidates that was found."""

    values: np.ndarray
    """(n,) float64: probability that the node is accepted."""
    alone: np.ndarray
    """(n, p) int64: which kind of candidate of each drafter it is."""
    together: np.ndarray
    """(n,) int64: which kind among all candidates."""


class FuseCalibration(NamedTuple):
    """What has been learned about p drafters: how often what they propose is accepted, alone and together."""

    alone: np.ndarray
    """(p, kinds, 2) float32: as `calibration.new_calibration`, for each drafter."""
    together: np.ndarray
    """(kinds, 2) float32: the same, with a kind for every combination of drafters."""

    @classmethod
    def empty(cls, parts: int) -> FuseCalibration:
        """Without observations of `parts` drafters."""
        return cls(np.zeros((parts, CELLS, 2), np.float32), new_calibration(3**parts))

    def values_of(self, merged: MergedDraft) -> NodeValues:
        """How likely the nodes are to be accepted."""
        n, parts = merged.nodes.ranks.shape
        valued = NodeValues(np.ones(n), np.empty((n, parts), np.int64), np.empty(n, np.int64))
        _value(merged.nodes, self, valued)
        return valued

    def learn(self, merged: MergedDraft, valued: NodeValues, tokens: Sequence[int]) -> None:
        """Counts what followed the accepted nodes, and what could have: `tokens` are the text's after the root."""
        _learn(merged.nodes, self, valued, np.array(tokens))


@compiled
def _value(nodes: MergedNodes, calibration: FuseCalibration, valued: NodeValues) -> None:
    parents, ranks, values = nodes.parents, nodes.ranks, valued.values
    n, parts = ranks.shape
    proposes = np.zeros((n, parts), np.bool_)
    for node in range(1, n):
        for part in range(parts):
            proposes[parents[node], part] |= ranks[node, part] >= 0
    mixed, kinds = np.zeros(n), np.zeros(n, np.int64)
    for node in range(1, n):
        proposers = 0
        for part in range(parts):
            kinds[node] *= 3
            if ranks[node, part] >= 0:
                likely = nodes.confidences[node, part]
                cell = cell_of(likely, ranks[node, part], match_kind(nodes.depths[node]))
                valued.alone[node, part] = cell
                mixed[node] += chance(calibration.alone[part], cell, likely)
                kinds[node] += 2
                proposers += 1
            elif proposes[parents[node], part]:
                kinds[node] += 1
                proposers += 1
        mixed[node] /= proposers
    sums = np.zeros(n)
    for node in range(1, n):
        rank = 0
        for other in range(1, n):
            rank += parents[other] == parents[node] and mixed[other] > mixed[node]
        valued.together[node] = cell_of(mixed[node], rank, kinds[node], 3**parts)
        values[node] = chance(calibration.together, valued.together[node], mixed[node])
        sums[parents[node]] += values[node]
    for node in range(1, n):  # of siblings at most one is right
        values[node] *= values[parents[node]] / max(1.0, sums[parents[node]])


@compiled
def _learn(nodes: MergedNodes, calibration: FuseCalibration, valued: NodeValues, chosen: np.ndarray) -> None:
    at = 0
    for token in chosen:
        following = -1
        for node in range(1, len(nodes.parents)):
            if nodes.parents[node] != at:
                continue
            right = nodes.tokens[node] == token
            for part in range(nodes.ranks.shape[1]):
                if nodes.ranks[node, part] >= 0:
                    count(calibration.alone[part], valued.alone[node, part], right)
            count(calibration.together, valued.together[node], right)
            if right:
                following = node
        if following < 0:
            return
        at = following


@cache
def warm_up() -> None:
    """Compile what a step needs, on a draft of two tokens."""
    merged, calibration = merge_drafts([Draft(chain(1), torch.zeros(2, dtype=torch.long))]), FuseCalibration.empty(1)
    calibration.learn(merged, calibration.values_of(merged), [0])


def kept_first(merged: MergedDraft, most: int) -> tuple[frozenset[int], frozenset[int]]:
    """The nodes kept whatever their value, where `most` may be drafted, and those of them that count as drawn."""
    kept: frozenset[int] = frozenset({0})
    drawn: frozenset[int] = frozenset()
    for depth in sorted({int(merged.nodes.depths[node]) for node in merged.drawn_from}):
        layer = frozenset(node for node in merged.drawn_from if merged.nodes.depths[node] == depth)
        more = kept | _with_ancestors(merged, layer)
        if len(more) > most + 1:
            break
        kept, drawn = more, drawn | layer
    for nodes in merged.needed:
        more = kept | _with_ancestors(merged, nodes)
        kept = more if len(more) <= most + 1 else kept
    return kept, drawn


def _with_ancestors(merged: MergedDraft, nodes: Sequence[int] | frozenset[int]) -> frozenset[int]:
    found: set[int] = set()
    for node in nodes:
        while node > 0 and node not in found:
            found.add(node)
            node = int(merged.nodes.parents[node])
    return frozenset(found)


def best(values: np.ndarray, first: frozenset[int], most: int, costs: np.ndarray, spent: float = 0.0) -> np.ndarray:
    """The nodes to verify, ascending: `first`, which is closed under parents, and the most valuable others.

    `values` (n,) never rise from a node to its child. At most `most` nodes besides the root are kept, those in `first`
    included. `costs` (most + 1,) are the times of forward passes over 1, 2, ... nodes: as many nodes are kept as bring
    the most expected tokens per time, `spent` being the time that drafting took. If it is empty, all are kept.
    """
    later = np.ones(len(values), bool)
    later[list(first)] = False
    # Stable: of equal values the parent, which comes first, stays first.
    order = np.lexsort((-values, later))[: most + 1]
    if len(costs):
        least = len(first) - 1
        expected, times = values[order].cumsum(), costs[: len(order)] + spent
        order = order[: len(first) + paying_nodes(expected[least:], times[least:])]
    return np.sort(order)
