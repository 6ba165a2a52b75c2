"""Several drafts of one sequence as one tree: merged, valued by past acceptance, and pruned.

Nodes with the same token on the same path become one node, with a rank and a confidence for each drafter that proposes
it. The confidence of a drafter is calibrated by confidence, rank and depth. The mean of several is calibrated again, by
which drafters propose the token, propose others, or nothing: tokens that drafters agree on are far more often correct.
A node's value is the product of the probabilities along its path, by which the tree is pruned (Sequoia, 2402.12374,
section 4.1).

Sampled drafts (`Draft.sampled_from`) stay exact: for one sampling drafter, whole layers are kept, as many as fit. The
number of nodes of a layer depends on the tokens sampled above it, never on those in it. Deeper sampled nodes, and those
of other drafters, count as deterministic and may be dropped for any reason.

Cost per step: about a microsecond per node in Python, less in compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from ..._util.compiled import compiled
from ...recycling.calibration import CELLS, calibrated, cell_of, count, match_kind, new_calibration
from ...trees.draft import Draft, DraftBuilder

_UNSURE = 0.5
"""Confidence in the best candidate of a drafter without probabilities; each further candidate has half of it."""


class Merged(NamedTuple):
    """p drafts merged: every path occurs once; n nodes, the root included. A `Draft` has one probability per node; the
    calibration needs one per part.
    """

    draft: Draft
    """Without probabilities yet; only the first draft with sampled nodes keeps them as sampled."""
    ranks: np.ndarray
    """(n, p) int64: the node's rank in each draft, -1 if not proposed."""
    confidences: np.ndarray
    """(n, p) float32: each drafter's probability of the node after its parent."""
    needed: Sequence[Sequence[int]]
    """(p): see `Draft.needed`."""

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Return the nodes with these tokens along a path from the root, as far as they exist."""
        path: list[int] = []
        for length in range(1, len(tokens) + 1):
            nodes = self.draft.carrying(tokens[:length])
            if not nodes:
                break
            path += nodes
        return path


def merge_drafts(drafts: Sequence[Draft]) -> Merged:
    """Merge drafts with one root."""
    drawing = next((part for part, draft in enumerate(drafts) if draft.sampled_from), 0)
    # The nodes of the sampling drafter come first in every layer, so that siblings keep their order of sampling.
    order = sorted(range(len(drafts)), key=lambda part: part != drawing)
    tokens = [draft.tokens.tolist() for draft in drafts]
    grown, places = DraftBuilder(tokens[0][0]), [[0] for _ in drafts]
    depths, parents = [draft.depths.tolist() for draft in drafts], [draft.parents.tolist() for draft in drafts]
    for depth in range(1, max(draft.depth for draft in drafts) + 1):
        for part in order:
            here = places[part]
            while len(here) < len(drafts[part]) and depths[part][len(here)] == depth:
                here.append(grown.add(here[parents[part][len(here)]], tokens[part][len(here)]))
    ranks = np.full((len(grown.parents), len(drafts)), -1, np.int64)
    confidences = np.zeros(ranks.shape, np.float32)
    for part, draft in enumerate(drafts):
        # In reverse order: of two equal siblings the first one wins.
        nodes, own_ranks = np.array(places[part])[::-1], draft.ranks[::-1]
        ranks[nodes, part] = own_ranks
        if draft.probabilities is None:
            confidences[nodes, part] = _UNSURE ** (own_ranks + 1.0)
        else:
            confidences[nodes, part] = np.clip(draft.probabilities[::-1], 0, 1)
    sampled = {places[drawing][node]: source for node, source in (drafts[drawing].sampled_from or {}).items()}
    return Merged(
        replace(grown.draft(), sampled_from=sampled or None),
        ranks,
        confidences,
        [[here[node] for node in draft.needed] for draft, here in zip(drafts, places, strict=True)],
    )


class NodeValues(NamedTuple):
    """Acceptance probabilities of n nodes, and the bins of their candidates."""

    values: np.ndarray
    """(n,) float64: probability that the node is accepted."""
    alone: np.ndarray
    """(n, p) int64: bin of the candidate for each drafter."""
    joint: np.ndarray
    """(n,) int64: bin in the joint calibration."""


class FuseCalibration(NamedTuple):
    """Acceptance statistics of p drafters, separate and joint."""

    alone: np.ndarray
    """(p, kinds, 2) float32: a `calibration.new_calibration` for each drafter."""
    joint: np.ndarray
    """(kinds, 2) float32: the same, with bins for every combination of drafters."""

    @classmethod
    def empty(cls, parts: int) -> FuseCalibration:
        """Return the statistics of `parts` drafters without observations."""
        return cls(np.zeros((parts, CELLS, 2), np.float32), new_calibration(3**parts))

    def values_of(self, merged: Merged) -> NodeValues:
        """Return the acceptance probabilities of the nodes."""
        n, parts = merged.ranks.shape
        valued = NodeValues(np.ones(n), np.empty((n, parts), np.int64), np.empty(n, np.int64))
        draft = merged.draft
        _value(draft.parents, draft.depths, merged.ranks, merged.confidences, self, valued)
        return valued

    def learn(self, merged: Merged, valued: NodeValues, tokens: Sequence[int]) -> None:
        """Count accepted nodes and their rejected siblings; `tokens` are the sequence's tokens after the root."""
        draft = merged.draft
        _learn(draft.parents, draft.tokens, merged.ranks, self, valued, np.array(tokens))


@compiled
def _value(
    parents: np.ndarray,
    depths: np.ndarray,
    ranks: np.ndarray,
    confidences: np.ndarray,
    calibration: FuseCalibration,
    valued: NodeValues,
) -> None:
    values = valued.values
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
                confidence = confidences[node, part]
                cell = cell_of(confidence, ranks[node, part], match_kind(depths[node]))
                valued.alone[node, part] = cell
                mixed[node] += calibrated(calibration.alone[part], cell, confidence)
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
        valued.joint[node] = cell_of(mixed[node], rank, kinds[node], 3**parts)
        values[node] = calibrated(calibration.joint, valued.joint[node], mixed[node])
        sums[parents[node]] += values[node]
    for node in range(1, n):  # at most one of several siblings is correct
        values[node] *= values[parents[node]] / max(1.0, sums[parents[node]])


@compiled
def _learn(
    parents: np.ndarray,
    tokens: np.ndarray,
    ranks: np.ndarray,
    calibration: FuseCalibration,
    valued: NodeValues,
    chosen: np.ndarray,
) -> None:
    at = 0
    for token in chosen:
        following = -1
        for node in range(1, len(parents)):
            if parents[node] != at:
                continue
            right = tokens[node] == token
            for part in range(ranks.shape[1]):
                if ranks[node, part] >= 0:
                    count(calibration.alone[part], valued.alone[node, part], right)
            count(calibration.joint, valued.joint[node], right)
            if right:
                following = node
        if following < 0:
            return
        at = following


@cache
def warm_up() -> None:
    """Compile the functions of a step, on a draft of two tokens."""
    merged, calibration = merge_drafts([Draft.chain([0, 0])]), FuseCalibration.empty(1)
    calibration.learn(merged, calibration.values_of(merged), [0])


def fixed_nodes(merged: Merged, most: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the nodes that are kept whatever their value if at most `most` nodes may be drafted, and those among them
    that count as sampled.
    """
    fixed: frozenset[int] = frozenset({0})
    sampled: frozenset[int] = frozenset()
    depths, lineages = merged.draft.depths.tolist(), merged.draft.lineages
    sources = merged.draft.sampled_from or {}
    for depth in sorted({depths[node] for node in sources}):
        layer = frozenset(node for node in sources if depths[node] == depth)
        more = fixed.union(*(lineages[node] for node in layer))
        if len(more) > most + 1:
            break
        fixed, sampled = more, sampled | layer
    for nodes in merged.needed:
        more = fixed.union(*(lineages[node] for node in nodes))
        fixed = more if len(more) <= most + 1 else fixed
    return fixed, sampled


def valued_draft(merged: Merged, values: np.ndarray, sampled: frozenset[int], fixed: frozenset[int]) -> Draft:
    """Return the merged draft with acceptance probabilities from `values` (n,). Only the sampled nodes in `sampled`
    count as sampled; nodes in `fixed` stay whatever their value.
    """
    draft, probabilities = merged.draft, np.ones(len(values), np.float32)
    above = values[draft.parents[1:]]
    probabilities[1:] = np.divide(values[1:], above, out=np.zeros(len(above)), where=above > 0)
    sources = {node: source for node, source in (draft.sampled_from or {}).items() if node in sampled}
    return replace(draft, probabilities=probabilities, sampled_from=sources or None, needed=fixed - {0})
