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
    info = model_info(model)
    if not info.supported:
        return info
    info = replace(info, no_fast_path=why_not_captured(info))
    if info.quantised or not info.tested:
        kind = "quantised" if info.quantised else f"family {info.family!r}"
        note = f"{info.model} ({kind}) is not among those tested: a self-test decides"
        info = replace(info, notes=(*info.notes, note))
    if not self_test:
        return info
    info = tested(model, info)
    fast = passes_or_reason(Target(model)) if info.supported else None
    return replace(info, no_fast_path=fast) if isinstance(fast, str) else info
