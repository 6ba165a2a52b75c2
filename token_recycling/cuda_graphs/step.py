"""One step of constant shapes: draft, mask, forward, accept, keep, as tensor operations that never wait for the host.

Everything that changes from step to step is a number on the device: the length of the text, the tokens and parents of
the nodes, which of them are accepted. So a step of n nodes in one band of lengths is the same sequence of operations
every time, and can be compiled as one graph and captured once. What the host must know comes back in one packed tensor.

Acceptance is that of `accept`: all nodes are judged at once, by one choice at every node. Greedily the choice is the
argmax; sampled it is one draw from the processed distribution (`noise`), which depends on the seed and the place in the
text, not on what was drafted. Either way every emitted token is chosen as in plain decoding. Cost of a step besides the
forward pass: some passes over the logits, and one move of the accepted slots for the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from transformers import LogitsProcessor, PreTrainedModel

from .._util.topk import grouped_topk
from ..loop.accept import GreedyPath, greedy_path
from ..model.architectures import Reach
from ..model.compat import told_slots
from ..model.tree_inputs import Masks, masks
from ..trees.packed import PackedTrees
from ..trees.tree import TreeShape
from .noise import gumbel
from .slots import FixedCache
from .sources import Source


@dataclass(frozen=True)
class Choice:
    """How the next token after a node is chosen."""

    warpers: Sequence[LogitsProcessor] = ()
    sample: bool = False

    def __call__(self, logits: torch.Tensor, noise: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """(n,) int64 from logits (n, vocabulary); `noise(vocabulary)`, of that shape, is called if one samples."""
        if not self.sample:
            return logits.argmax(dim=-1)
        scores = logits.to(torch.float32)
        for warper in self.warpers:
            scores = warper(None, scores)
        return (scores + noise(scores.shape[1])).argmax(dim=-1)


def tree_masks(
    layers: Mapping[str, Reach], shape: TreeShape, length: torch.Tensor, band: int, dtype: torch.dtype
) -> Masks:
    """(1, 1, n, band) each, to be added to attention scores: a node sees the text, `length` (1,) slots, and its
    ancestors.
    """
    n = len(shape.parents)
    after = torch.arange(band, device=length.device) - length
    nodes = after.clamp(0, n - 1)
    visible = (after < 0) | ((after < n) & shape.ancestors[:, nodes])
    positions = torch.where(after < 0, after, shape.depths[nodes]) + length
    return masks(layers, visible[None, None], (shape.depths + length)[None], positions[None], dtype)


@dataclass(frozen=True)
class StepPlan:
    """What is constant in a step: with it, every operation and every shape is known."""

    nodes: int
    """n, those that only fill up the bucket included."""
    depths: int
    """Nodes of the longest path that there can be, the root included."""
    band: int
    """Slots that attention runs over, those of the nodes included."""
    k: int
    """Likeliest tokens after every node that the host or the source learns from; 0 for none."""
    reports_candidates: bool
    """Whether the host wants them."""
    reports_tokens: bool
    """Whether the host has yet to hear what was drafted."""

    @property
    def reported(self) -> int:
        """Numbers that the host reads."""
        drafted = self.nodes * self.reports_tokens
        return 1 + 2 * self.depths + drafted + 2 * self.nodes * self.k * self.reports_candidates


class Verified(NamedTuple):
    """What the forward pass of a step gives."""

    logits: torch.Tensor
    """(n, vocabulary)."""
    report: torch.Tensor
    """(plan.reported,) int32, for the host: see `Report`."""
    accepted: GreedyPath


def verify(
    model: PreTrainedModel,
    cache: FixedCache,
    layers: Mapping[str, Reach],
    plan: StepPlan,
    source: Source,
    choice: Choice,
    root: torch.Tensor,
    seed: torch.Tensor,
) -> Verified:
    """Everything of a step but the move of the accepted slots, as one graph; `root` (1,) int64 becomes the next root.
    `seed`: (1,) int64, that of the text's draws. `layers`: the reach of each type of layer, as in `ModelInfo`.
    """
    tokens, shape = source.draft(root)
    length = cache.shared.length
    cache.aim(plan.nodes)
    logits = model(
        input_ids=tokens.clamp(min=0)[None],
        attention_mask=tree_masks(layers, shape, length, plan.band, model.dtype),
        position_ids=(shape.depths + length)[None],
        past_key_values=cache,
        use_cache=True,
        **told_slots(length, plan.nodes),
    ).logits[0]

    def noise(vocabulary: int) -> torch.Tensor:
        # Nodes of one depth stand at one place of the text, and one of them at most is visited.
        places = length + torch.arange(plan.depths, device=length.device)
        return gumbel(seed, places, vocabulary).index_select(0, shape.depths)

    trees = PackedTrees(length, tokens[None], shape.parents[None], shape.depths[None], shape.ancestors[None])
    accepted = GreedyPath(*(part[0] for part in greedy_path(trees, choice(logits, noise)[None], plan.depths)))
    root.copy_(accepted.tokens.index_select(0, accepted.number - 1))
    parts = [accepted.number, accepted.path, accepted.tokens]
    if plan.reports_tokens:
        parts.append(tokens)
    report = torch.cat(parts).to(torch.int32)
    if plan.k:
        values, ids = grouped_topk(logits, plan.k)
        source.note(tokens, ids)
        if plan.reports_candidates:
            shares = (values.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
            report = torch.cat([report, ids.flatten().to(torch.int32), shares.view(torch.int32).flatten()])
    return Verified(logits, report, accepted)


class Report:
    """What the host reads of a step."""

    def __init__(self, plan: StepPlan, numbers: np.ndarray) -> None:
        """`numbers` (plan.reported,) int32."""
        count, path, tokens, drafted, candidates = np.split(
            numbers, np.cumsum([1, plan.depths, plan.depths, plan.nodes * plan.reports_tokens])
        )
        accepted = int(count[0])
        self.path: list[int] = path[:accepted].tolist()
        """Accepted nodes."""
        self.tokens: list[int] = tokens[:accepted].tolist()
        """Emitted tokens."""
        self.drafted = drafted
        """(n,) int32: the tokens of the nodes, where the device drafts."""
        self.candidates: tuple[np.ndarray, np.ndarray] | None = None
        """(n, k) int32 and (n, k) float32: the likeliest tokens after every node, best first, and their probabilities;
        None if the plan does not report them.
        """
        if plan.reports_candidates:
            ids, shares = candidates.reshape(2, plan.nodes, plan.k)
            self.candidates = np.ascontiguousarray(ids), np.ascontiguousarray(shares).view(np.float32)
