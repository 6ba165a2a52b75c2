"""Checks whether a model can be accelerated; results are cached with the model (`facts`).

The model's class and configuration come first (`info`). Families that the tests of this library cover need no more.
Others, and quantized models, are tested once per machine (`self_test`). Users' code is checked per call (`foreign`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from .compat import attention_name
from .foreign import keeps_state
from .foreign.search import foreign_code, listed
from .info import MASKED_ATTENTION, ModelInfo, UnsupportedModelError, model_info
from .target import Target

if TYPE_CHECKING:
    from .self_test import Verdict

_SELF_TEST = "self-test"
_PASSED = "self-test passed"


def ready(model: PreTrainedModel) -> Target:
    """Return the target for a model. Raises UnsupportedModelError unless its trees are known to be exact."""
    try:
        target = Target(model)
        reason = _why_not(target)
    except UnsupportedModelError:
        raise
    except Exception as error:  # users' parts can fail in any way, even if `generate` works
        what = f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(f"{type(model).__name__} cannot be examined: {what}") from error
    if reason is not None:
        raise UnsupportedModelError(reason)
    configured = attention_name(target.config)
    if configured not in MASKED_ATTENTION:
        target.facts.warn_once(
            f"{configured} does not support tree masks: accelerated calls use {target.info.attention}; all others "
            f"keep {configured}"
        )
    return target


def why_not(model: PreTrainedModel) -> str | None:
    """Return why trees cannot be verified with this model, or None. An unknown family is tested once."""
    try:
        ready(model)
    except UnsupportedModelError as error:
        return str(error)
    return None


def _why_not(target: Target) -> str | None:
    """Return why the self-test refuses a model, or None; covered families need none."""
    facts, info = target.facts, target.info
    if facts.recall(_PASSED):
        return None
    if info.tested and not info.quantized:
        verdict = facts.recall(_SELF_TEST, of="code")
    else:  # a model that fails with a hook may pass without it
        with target.turns()():
            verdict = facts.get(_SELF_TEST, lambda: _verdict(target), of="code")
    if verdict is None:
        return None
    if verdict.reason is None:
        facts.get(_PASSED, lambda: True)
        return None
    foreign = foreign_code(target.model)
    return verdict.reason if not foreign else f"{verdict.reason}; it runs {listed(foreign)}"


def _verdict(target: Target) -> Verdict | None:
    """Return the verdict of the self-test; None without a test if foreign code in the model keeps state: the test would
    change it, and all calls fall back.
    """
    from .self_test import stored_verdict

    return None if keeps_state(target) else stored_verdict(target)


def check(model: PreTrainedModel, self_test: bool = False) -> ModelInfo:
    """Return whether and how a model can be accelerated, and why not; never raises for a model.

    `self_test` also compares the logits of a tree with those of linear decoding, which later calls reuse, and checks
    whether a step would make the host wait: about fifteen short forward passes.
    """
    from .graphs.support import passes_or_reason, why_not_captured
    from .self_test import verdict

    info = model_info(model)
    if not info.supported:
        return info
    info = replace(info, no_fast_path=why_not_captured(info))
    if info.quantized or not info.tested:
        reason = "quantized" if info.quantized else f"family {info.family!r}"
        note = f"{info.name} ({reason}) is not among those tested: a self-test decides"
        info = replace(info, notes=(*info.notes, note))
    if not self_test:
        return info
    try:
        target = Target(model)
    except UnsupportedModelError as error:
        return replace(info, reason=str(error))
    target.facts.forget(_SELF_TEST)
    target.facts.forget(_PASSED)
    result = target.facts.get(_SELF_TEST, lambda: verdict(target), of="code")
    info = replace(info, reason=result.reason, difference=result.difference, notes=(*info.notes, *result.notes))
    captured = passes_or_reason(target) if info.supported else None
    return replace(info, no_fast_path=captured) if isinstance(captured, str) else info
