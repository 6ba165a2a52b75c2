"""Speculative decoding with a second, smaller model: as a sequence, a tree or a graph.

SSD (Leviathan et al., 2211.17192), TSD (SpecInfer, 2305.09781) and GSD (Gong et al., 2407.16207) in one drafter. Both
models must share a tokenizer. Cost: a forward pass of the draft model per drafting step, and its prefill for every
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._shared.draft_models import CausalDrafter
from ._shared.pairing import DraftModelOption


@dataclass
class DraftModel(DraftModelOption, CausalDrafter):
    """Drafts with a second model that has the target's tokenizer."""
