"""Speculative decoding with a second, smaller model: as a sequence, a tree or a graph.

SSD (Leviathan et al., 2211.17192), TSD (SpecInfer, 2305.09781) and GSD (Gong et al., 2407.16207) in one drafter. Both
models must have one tokenizer. Cost per step: one forward pass of the draft model for every drafting step, and its
prefill for every text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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

    def drafting_model(self, target: Target) -> Target:
        if getattr(self, "_paired_with", None) is not target.model:
            self._paired = paired(self.model, target)
            self._paired_with = target.model
        return self._paired

    def _what(self) -> str:
        return str(self.model) if isinstance(self.model, str) else type(self.model).__name__
