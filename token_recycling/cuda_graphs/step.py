"""One step of constant shapes: mask, forward pass, acceptance, kept slots, as operations that never wait for the host.

What changes from step to step is numbers on the device: the packed drafts, seeds, tokens said before. So a step of b
sequences with n nodes each in one band of slots is the same sequence of operations every time, and can be captured
once. What the host must know comes back in one packed tensor.

Acceptance is that of `accept`: all nodes are judged at once, by one choice at every node. Greedily the choice is the
argmax; sampled it is one sample from the processed distribution (`noise`), which depends on the seed and the place in
the sequence, not on what was drafted. Cost besides the forward pass: some passes over the logits, and one move of the
accepted slots for the whole model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from .._util.topk import as_candidates, packed_candidates
from ..loop.accept import longest_path
from ..loop.processors import Scope, scope
from ..model.inspection import layer_states
from ..model.kv_cache import Frame, TreeCache
from ..model.tree_model import TreeModel
from ..trees.packed import PackedTrees
from .noise import gumbel


@dataclass(frozen=True)
class Choice:
    """Token selection after a node: processors, then argmax or sampling."""

    processors: Sequence[LogitsProcessor] = ()
    """Processors that `fits` accepts."""
    sample: bool = False

    @staticmethod
    def fits(processor: LogitsProcessor) -> bool:
        """Whether a processor can be part of a captured step."""
        return scope(processor) >= Scope.EACH_ROW or type(processor) is RepetitionPenaltyLogitsProcessor

    @property
    def penalised(self) -> LogitsProcessor | None:
        """The repetition penalty, if there is one; it needs the tokens of the sequence so far."""
        return next((one for one in self.processors if type(one) is RepetitionPenaltyLogitsProcessor), None)

    @property
    def key(self) -> Hashable:
        """Equal for choices that are made alike."""
        return self.sample, tuple(map(_key, self.processors))

    def scores(self, logits: torch.Tensor, trees: PackedTrees, said: torch.Tensor | None) -> torch.Tensor:
        """Processed scores (b, n, vocabulary) of logits; `said` (b, vocabulary) bool marks the tokens of each sequence
        up to its root, if there is a penalty.
        """
        if not self.processors and not self.sample:
            return logits
        scores = logits.to(torch.float32).flatten(0, 1)
        for processor in self.processors:
            if type(processor) is RepetitionPenaltyLogitsProcessor:
                assert said is not None, "a penalty needs the tokens so far"
                repeated = _said_by_node(said, trees).flatten(0, 1)
                penalised = torch.where(scores < 0, scores * processor.penalty, scores / processor.penalty)
                scores = torch.where(repeated, penalised, scores)
            else:
                scores = processor(None, scores)
        return scores.view(logits.shape)

    def tokens(self, scores: torch.Tensor, trees: PackedTrees, seeds: torch.Tensor, depths: int) -> torch.Tensor:
        """The choice (b, n) int64 at every node. `seeds` (b,) int64; no node is as deep as `depths`."""
        if self.sample:
            batch, n, vocabulary = scores.shape
            # Nodes of one depth stand at one place of a sequence, and one of them at most is visited.
            along = torch.arange(depths, device=scores.device)
            places = (trees.lengths[:, None] + along).flatten()
            noise = gumbel(seeds.repeat_interleave(depths, output_size=batch * depths), places, vocabulary)
            rows = torch.arange(batch, device=scores.device)[:, None] * depths + trees.depths
            scores = scores + noise.index_select(0, rows.flatten()).view(batch, n, vocabulary)
        return scores.argmax(dim=-1)


def _key(processor: LogitsProcessor) -> Hashable:
    if type(processor) is RepetitionPenaltyLogitsProcessor:  # whose other attributes hold tokens
        return type(processor), processor.penalty
    return type(processor), tuple(sorted(vars(processor).items()))


def _said_by_node(said: torch.Tensor, trees: PackedTrees) -> torch.Tensor:
    """(b, n, vocabulary) bool: the tokens before each node and on its path, the node included."""
    batch, n = trees.tokens.shape
    vocabulary = said.shape[1]
    # The root counts only if `said` says so, which may leave out a prompt. One column more, for what is not on a path.
    below = trees.ancestors & (torch.arange(n, device=said.device) > 0)
    on_path = torch.where(below, trees.tokens.clamp(min=0)[:, None], vocabulary)
    marked = torch.zeros(batch, n, vocabulary + 1, dtype=torch.bool, device=said.device).scatter_(2, on_path, True)
    return marked[..., :vocabulary] | said[:, None]


@dataclass(frozen=True)
class StepPlan:
    """Constants of a step, which determine every operation and shape."""

    batch: int
    nodes: int
    """n of each sequence, those that only fill up the bucket included."""
    depths: int
    """Nodes of the longest path that there can be, the root included."""
    band: int
    """Slots that attention runs over, those of the nodes included."""
    k: int = 0
    """Most probable tokens after every node, for the host to learn from; 0 for none."""
    states: tuple[int, ...] = ()
    """Numbers of the hidden states that drafters read."""


class Verified(NamedTuple):
    """Results of a step, on the device."""

    report: torch.Tensor
    """(b, numbers) int32, for the host: see `Report`."""
    logits: torch.Tensor
    """(b, n, vocabulary)."""
    scores: torch.Tensor
    """(b, n, vocabulary): processed logits; the logits themselves without processors."""
    states: torch.Tensor | None
    """(b, n, states * hidden); None if the plan names none."""


def verify(
    target: TreeModel,
    slots: TreeCache,
    plan: StepPlan,
    choice: Choice,
    trees: PackedTrees,
    seeds: torch.Tensor,
    said: torch.Tensor | None,
) -> Verified:
    """Everything of a step. Nodes are written to the slots behind each sequence, and the accepted ones moved together;
    nothing else changes, so that a step may be run again.
    """
    along = torch.arange(plan.nodes, device=target.device)
    frame = Frame(trees.lengths[:, None] + along, plan.band, plan.band)
    inputs: dict[str, Any] = target.inputs.of_trees(trees, trees.lengths[:, None], plan.band)
    with layer_states(target.model, lambda _: plan.states) if plan.states else nullcontext([None]) as states:
        logits = target.forward({**inputs, "frame": frame}, slots.cache)
    scores = choice.scores(logits, trees, said)
    found = longest_path(trees, choice.tokens(scores, trees, seeds, plan.depths), plan.depths)
    _move(slots, trees.lengths, found.path)
    parts = [torch.cat(found, dim=1).to(torch.int32)]
    if plan.k:
        parts += packed_candidates(logits, plan.k)
    report = torch.cat([part.reshape(plan.batch, -1) for part in parts], dim=1)
    return Verified(report, logits, scores, states[-1])


def _move(slots: TreeCache, lengths: torch.Tensor, path: torch.Tensor) -> None:
    """Move the slots of each path (b, depths) to the end of its sequence; what is moved beyond the accepted ones lands
    behind it, where the next step overwrites it.
    """
    if path.shape[1] == 1:
        return  # the root is where it belongs
    places = lengths[:, None] + torch.arange(1, path.shape[1], device=path.device)
    sources = lengths[:, None] + path[:, 1:]
    for store in slots.stores:
        here = store.buffer[:, : len(path)]
        shape = (*here.shape[:3], path.shape[1] - 1, here.shape[4])
        moved = here.gather(3, sources[None, :, None, :, None].expand(shape))
        here.scatter_(3, places[None, :, None, :, None].expand(shape), moved)


class Report:
    """The part of a step's results that the host reads."""

    def __init__(self, plan: StepPlan, numbers: np.ndarray) -> None:
        """`numbers` (b, ...) int32, as in `Verified`."""
        self._plan, self._numbers = plan, numbers

    def accepted(self, row: int) -> tuple[list[int], list[int]]:
        """The accepted nodes of a sequence and the tokens that are emitted, as many."""
        number, depths = self._numbers[row, 0], self._plan.depths
        path, tokens = self._numbers[row, 1 : 1 + 2 * depths].reshape(2, depths)[:, :number].tolist()
        return path, tokens

    def candidates(self, row: int, nodes: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the most probable tokens after the first nodes with probabilities, (nodes, k) int32, float32; None if
        the plan has none.
        """
        if not self._plan.k:
            return None
        return as_candidates(self._numbers[row, 1 + 2 * self._plan.depths :], self._plan.nodes, self._plan.k, nodes)
