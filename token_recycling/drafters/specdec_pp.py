"""SpecDec++: a draft model that stops where the target will probably reject (Huang et al., 2405.19715).

A small head reads the draft model's last hidden state after every drafted token and predicts the probability that the
target accepts the token. Drafting ends once the predicted probability that any token so far is rejected exceeds the
threshold (theorem 3.1). All drafted tokens are verified, so sampled drafts preserve the target's output distribution.

Cost per step: a forward pass of the draft model per drafted token, and one more where the head ends the draft.

The head (section 3.2) predicts the probability that the target accepts a drafted token, given that it accepts the
preceding ones. It reads the draft model's last hidden state after that token: depth + 1 matrix products of one row. A
head is saved as a part of the draft model that it was trained on, by default in a subfolder of the model's folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..model.hidden import output_width
from ..model.target import Target
from ._shared.draft_models import ModelDrafter, ModelSequence
from ._shared.graph import Graph, Rules, Stop
from ._shared.neural import PerTarget, placed_copy
from ._shared.pairing import DraftModelOption
from ._shared.saved import TrainedPartError, check_model, load_part, save_part

KIND = "specdec_pp"
"""Name of the part, and of its folder within the draft model's folder."""


class AcceptanceHead(torch.nn.Module):
    """Residual blocks x + SiLU(W x + b), and a linear layer to one number, the log odds of acceptance."""

    def __init__(self, width: int, depth: int) -> None:
        """`width`: the draft model's hidden size; `depth`: number of blocks. Initial odds are even."""
        super().__init__()
        linear = torch.nn.utils.skip_init  # no random numbers are used: seeded outputs equal those of `generate`
        self.blocks = torch.nn.ModuleList(linear(torch.nn.Linear, width, width) for _ in range(depth))
        self.output = linear(torch.nn.Linear, width, 1)
        for weight in self.parameters():
            torch.nn.init.zeros_(weight)

    @torch.no_grad()
    def reset(self, seed: int = 0) -> None:
        """Set the initial weights for training: blocks that differ from each other, still with even odds."""
        generator = torch.Generator().manual_seed(seed)
        for block in self.blocks:
            assert isinstance(block, torch.nn.Linear)
            block.weight.copy_(torch.randn(block.weight.shape, generator=generator) / self.width**0.5)

    @property
    def width(self) -> int:
        """Size of the hidden states that it reads."""
        return self.output.in_features

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return log odds (...) from states (..., width)."""
        for block in self.blocks:
            states = states + torch.nn.functional.silu(block(states))
        return self.output(states)[..., 0]

    @torch.no_grad()
    def acceptance(self, state: torch.Tensor) -> float:
        """Return the probability that a token is accepted, from the state (width,) after it."""
        return float(torch.sigmoid(self(state.to(self.output.weight.dtype))))


def save_head(
    folder: str | os.PathLike[str], head: AcceptanceHead, draft: PreTrainedModel, facts: Mapping[str, Any]
) -> None:
    """Write a head for a draft model; `facts` describe its training."""
    save_part(folder, KIND, head.state_dict(), draft, {**facts, "width": head.width, "depth": head.depth})


def load_head(folder: str | os.PathLike[str], draft: PreTrainedModel) -> AcceptanceHead:
    """Return the head in a folder; raises TrainedPartError for a damaged or wrong head, FileNotFoundError for none."""
    tensors, facts = load_part(folder, KIND)
    check_model(folder, facts, draft)
    width, depth = facts.get("width"), facts.get("depth")
    if width != output_width(draft) or not isinstance(depth, int) or depth < 0:
        raise TrainedPartError(
            f"{folder}: width must be {output_width(draft)}, the draft model's hidden size, and depth must be >= 0, "
            f"got {width!r} and {depth!r}; use the head of this draft model, or train one"
        )
    head = AcceptanceHead(width, depth)
    try:
        head.load_state_dict(tensors)
    except RuntimeError:
        raise TrainedPartError(
            f"{folder}: weights do not match the {depth} blocks of width {width} in its JSON; train the head again"
        ) from None
    return head.eval().requires_grad_(False)


@dataclass
class SpecDecPP(DraftModelOption, ModelDrafter):
    """Drafts one branch with a second model, as long as the whole branch is likely to be accepted."""

    reads_states = True

    head: str | AcceptanceHead = ""
    """Folder of a trained head; by default a subfolder of the draft model's folder. In Python also a head."""
    threshold: float = 0.7
    """Stop drafting once the head's predicted probability of a rejection exceeds this."""
    min_length: int = 2
    """Minimum number of drafted tokens."""
    max_length: int = 20
    """Maximum number of drafted tokens."""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be from 0 to 1, got {self.threshold}")
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"min_length must be >= 1 and <= max_length, got {self.min_length} and {self.max_length}")
        self._heads = PerTarget[AcceptanceHead]()
        """By draft model."""

    def fit(self, target: Target) -> None:
        self._head_for(self.placed(target))

    def _head_for(self, draft: Target) -> AcceptanceHead:
        """Return the head on the draft model's device."""
        return self._heads.of(draft, lambda: self._placed_head(draft))

    def _placed_head(self, draft: Target) -> AcceptanceHead:
        head = self._own_head(draft.model)
        return placed_copy(head, draft.device, head.output.weight.dtype)

    def _own_head(self, model: PreTrainedModel) -> AcceptanceHead:
        if isinstance(self.head, AcceptanceHead):
            if self.head.width != output_width(model):
                raise ValueError(
                    f"the head must fit the draft model's hidden size, {output_width(model)}, got {self.head.width}"
                )
            return self.head
        folder = Path(self.head or Path(model.name_or_path) / KIND).expanduser()
        if not self.head and (not model.name_or_path or not folder.parent.is_dir()):
            raise ValueError(
                f"head is required, since {self.model_description()} has no local folder that could contain one: "
                "specdec_pp:head=FOLDER"
            )
        return load_head(folder, model)

    def rules_for(self, target: Target, model: Target, prompt: torch.Tensor) -> Rules:
        self._head_for(model)  # report a missing head at the first sequence, not at its first draft
        return Rules(depth=self.max_length, k=1, nodes=self.max_length)

    def stop(self, sequence: ModelSequence) -> Stop:
        """Stop by the probability that all tokens so far are accepted: the product of the head's predictions."""
        head, probability = self._head_for(sequence.reader.model), 1.0

        def expected_rejection(graph: Graph) -> bool:
            nonlocal probability
            assert sequence.reader.states is not None
            probability *= head.acceptance(sequence.reader.states[-1])
            stops = len(graph) - 1 >= self.min_length and 1 - probability > self.threshold
            sequence.counts["stopped_by_head"] += stops
            return stops

        return expected_rejection

    def draft_description(self, rules: Rules) -> str:
        lengths = f"{self.min_length} to {self.max_length} tokens"
        return f"{lengths}, ended where a rejection is more likely than {self.threshold:g}"
