"""Speculative decoding with a second, smaller model: as a sequence, a tree or a graph.

SSD (Leviathan et al., 2211.17192), TSD (SpecInfer, 2305.09781) and GSD (Gong et al., 2407.16207) in one drafter. Both
models must have one tokenizer. Cost per step: one forward pass of the draft model for every drafting step, and its
prefill for every text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..draft_models.drafter import CausalDrafter
from ..draft_models.pairing import paired
from ..target import Target


@dataclass
class DraftModel(CausalDrafter):
    """Drafts with a second model that has the target's tokenizer."""

    model: str | PreTrainedModel
    """A local folder or a hub name; in Python also a model."""

    @classmethod
    def example(cls, model: PreTrainedModel, folder: Path) -> DraftModel:
        """A model drafts for itself."""
        return cls(model)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pairs: WeakKeyDictionary[PreTrainedModel, Target] = WeakKeyDictionary()

    def fork(self) -> DraftModel:
        """Shares the draft model, which is loaded once for all."""
        other = replace(self)
        other._pairs = self._pairs
        return other

    def drafting_model(self, target: Target) -> Target:
        if target.model not in self._pairs:
            self._pairs[target.model] = paired(self.model, target)
        return self._pairs[target.model]

    def _what(self) -> str:
        return str(self.model) if isinstance(self.model, str) else type(self.model).__name__
