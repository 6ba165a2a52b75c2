"""Checks in advance whether a model is supported: by what is known of its architecture, and by trying it."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from .graphs.support import passes_or_reason, why_not_captured
from .info import ModelInfo, model_info
from .support import tested
from .target import Target


def check(model: PreTrainedModel, self_test: bool = False) -> ModelInfo:
    """Whether and how a model can be accelerated, and why not; never raises for a model.

    `self_test` also compares the logits of a tree with those of linear decoding, and watches whether a step would make
    the host wait: some fifteen short forward passes.
    """
    found = model_info(model)
    if not found.supported:
        return found
    found = replace(found, no_fast_path=why_not_captured(found))
    if found.quantised or not found.tested:
        kind = "quantised" if found.quantised else f"family {found.family!r}"
        note = f"{found.model} ({kind}) is not among those tested: a self-test decides"
        found = replace(found, notes=(*found.notes, note))
    if not self_test:
        return found
    found = tested(model, found)
    fast = passes_or_reason(Target(model)) if found.supported else None
    return replace(found, no_fast_path=fast) if isinstance(fast, str) else found
