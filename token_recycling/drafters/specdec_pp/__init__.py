"""SpecDec++: a draft model that stops where the target will probably reject (Huang et al., 2405.19715).

A small head reads the draft model's last hidden state after every drafted token and predicts the probability that the
target accepts it (`head`). Drafting ends once the predicted probability that any token so far is rejected exceeds the
threshold (theorem 3.1). All drafted tokens are verified, so with sampled drafts the output's distribution stays the
target's.

Cost per step: a forward pass of the draft model per drafted token, and one more where the head ends the draft.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...model.inspection import output_width
from ...model.tree_model import TreeModel
from .._shared.base import ModelDrafter, ModelSequence
from .._shared.expand import Graph, Rules, Stop
from .._shared.pairing import DraftModelOption, Pairs
from .._shared.placed import placed_copy
from .head import KIND, AcceptanceHead, load_head


@dataclass
class SpecDecPP(DraftModelOption, ModelDrafter):
    """Drafts one branch with a second model, while it is likely to be accepted as a whole."""

    reads_states = True

    head: str | AcceptanceHead = ""
    """Folder of a trained head; by default in that of the draft model. In Python also a head."""
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
        self._heads = Pairs[AcceptanceHead]()

    def fit(self, target: TreeModel) -> None:
        self._head_for(self.drafting_model(target).model)

    def fork(self) -> SpecDecPP:
        other: SpecDecPP = super().fork()
        other._heads = self._heads
        return other

    def _head_for(self, model: PreTrainedModel) -> AcceptanceHead:
        return self._heads.of(model, lambda: self._placed_head(model))

    def _placed_head(self, model: PreTrainedModel) -> AcceptanceHead:
        head = self._found_head(model)
        return placed_copy(head, model.get_input_embeddings().weight.device, head.output.weight.dtype)

    def _found_head(self, model: PreTrainedModel) -> AcceptanceHead:
        if isinstance(self.head, AcceptanceHead):
            if self.head.width != output_width(model):
                raise ValueError(
                    f"the head must fit the draft model's hidden size, {output_width(model)}, got {self.head.width}"
                )
            return self.head
        folder = Path(self.head or Path(model.name_or_path) / KIND).expanduser()
        if not self.head and (not model.name_or_path or not folder.parent.is_dir()):
            raise ValueError(
                f"head is required, since {self.what()} has no local folder that could hold one: specdec_pp:head=FOLDER"
            )
        return load_head(folder, model)

    def rules_for(self, target: TreeModel, model: TreeModel, prompt: torch.Tensor) -> Rules:
        self._head_for(model.model)  # report a missing head at the first sequence, not at its first draft
        return Rules(depth=self.max_length, k=1, nodes=self.max_length)

    def stop(self, sequence: ModelSequence) -> Stop:
        """Stop by the probability that all tokens so far are accepted: the product of the head's predictions."""
        head, probability = self._head_for(sequence.reader.model.model), 1.0

        def expected_rejection(graph: Graph) -> bool:
            nonlocal probability
            assert sequence.reader.states is not None
            probability *= head.acceptance(sequence.reader.states[-1])
            stops = len(graph) - 1 >= self.min_length and 1 - probability > self.threshold
            sequence.counts["stopped_by_head"] += stops
            return stops

        return expected_rejection

    def shape(self, rules: Rules) -> str:
        lengths = f"{self.min_length} to {self.max_length} tokens"
        return f"{lengths}, ended where a rejection is more likely than {self.threshold:g}"
