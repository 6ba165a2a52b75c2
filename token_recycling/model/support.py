"""May a model be accelerated? Answers are found once, and kept with the model (`facts`).

`ready` answers for a model, `CodeInModel` for a call: for the code in the model and beside it. What a model's class and
configuration say comes first (`info`). Families that were compared when this library was made need no more. Others, and
quantized models, are tested once per machine (`self_test`). Code that is not the family's own, as hooks, adapters and
overridden methods, is tried once for each form of it (`trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .compat import attention_name
from .facts import Kept, kept_of
from .foreign import Foreign, foreign_code, is_of, listed, why_not_patched, why_not_plain_loop
from .info import MASKED_ATTENTION, ModelInfo, UnsupportedModelError, model_info
from .target import Target

if TYPE_CHECKING:
    from .foreign.plain import Reach

_SELF_TEST = "self-test"
_PASSED = "self-test passed"
_QUANTISERS = frozenset(
    {
        *("bitsandbytes", "torchao", "optimum", "auto_gptq", "gptqmodel", "awq", "hqq", "eetq", "aqlm", "fbgemm_gpu"),
        *("compressed_tensors", "quark", "auto_round", "vptq", "flute", "spqr_quant", "fp_quant"),
    }
)
"""Libraries of quantized layers, whose code keeps no state."""


def ready(model: PreTrainedModel, target: Target | None = None) -> Target:
    """Return the model, ready to read trees: `target`, if nothing has changed since it was made. Raises
    UnsupportedModelError where trees are not exact.
    """
    if target is not None and target.is_current():
        return target
    target = Target(model)
    reason = _why_not(target.kept, model, target.info)
    if reason is not None:
        raise UnsupportedModelError(reason)
    configured = attention_name(target.config)
    if configured not in MASKED_ATTENTION:
        target.kept.say_once(
            f"{configured} takes no tree mask: accelerated calls use {target.info.attention}; all others, and the "
            f"model after them, keep {configured}"
        )
    return target


def why_not(model: PreTrainedModel) -> str | None:
    """Return why a tree cannot be verified with this model, or None if it can. A model of an unknown family is tested
    once, on a short sequence.
    """
    info = model_info(model)
    return info.reason if not info.supported else _why_not(kept_of(model), model, info)


def _why_not(kept: Kept, model: PreTrainedModel, info: ModelInfo) -> str | None:
    """Return why the self-test refuses a supported model, or None; families tested before need none."""
    if kept.recall(_PASSED):
        return None
    if info.tested and not info.quantised:
        verdict = kept.recall(_SELF_TEST, of="code")
    else:  # what fails with a hook may pass without it
        from .self_test import kept_verdict

        verdict = kept.get(_SELF_TEST, lambda: kept_verdict(model, info), of="code")
    if verdict is None:
        return None
    if verdict.reason is None:
        kept.get(_PASSED, lambda: True)
        return None
    foreign = foreign_code(model)
    return verdict.reason if not foreign else f"{verdict.reason}; it runs {listed(foreign)}"


def check(model: PreTrainedModel, self_test: bool = False) -> ModelInfo:
    """Whether and how a model can be accelerated, and why not; never raises for a model.

    `self_test` also compares the logits of a tree with those of linear decoding, which counts for later calls, and
    watches whether a step would make the host wait: some fifteen short forward passes.
    """
    from .graphs.support import passes_or_reason, why_not_captured
    from .self_test import verdict

    info = model_info(model)
    if not info.supported:
        return info
    info = replace(info, no_fast_path=why_not_captured(info))
    if info.quantised or not info.tested:
        reason = "quantised" if info.quantised else f"family {info.family!r}"
        note = f"{info.model} ({reason}) is not among those tested: a self-test decides"
        info = replace(info, notes=(*info.notes, note))
    if not self_test:
        return info
    kept = kept_of(model)
    kept.forget(_SELF_TEST)
    kept.forget(_PASSED)
    result = kept.get(_SELF_TEST, lambda: verdict(model, info), of="code")
    info = replace(info, reason=result.reason, difference=result.difference, notes=(*info.notes, *result.notes))
    captured = passes_or_reason(Target(model)) if info.supported else None
    return replace(info, no_fast_path=captured) if isinstance(captured, str) else info


# Foreign code


class CodeInModel:
    """The foreign code in a model, as one call finds it, and what it prevents (`foreign`). Trials are kept; what the
    code reaches, which others may change between calls, is searched in every call, once.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self.pieces, self._reason = target.kept.get("foreign code", lambda: _search(target), of="code")

    @cached_property
    def _reaches(self) -> list[Reach]:
        from .foreign.plain import reaches

        return reaches(self._target.model, self.pieces)

    def why_not(self, batch: int, beside: Sequence[Any], cache: Cache | None) -> str | None:
        """Return why it prevents accelerating a call with `batch` sequences, or None; with code `beside` the model
        (`code_beside`), and in the caller's own `cache`, if the call has one.
        """
        reason = self._reason
        if reason is None and cache is not None:
            reason = why_not_patched(cache)
        if reason is None and self.pieces:
            from . import trial

            reason = trial.why_not(self._target, self.pieces, self._reaches, batch)
        if reason is None and beside:
            from .foreign import bystanders

            reason = bystanders.why_not(self._target.model, self.pieces, beside, cache)
        return reason

    def mixes_sequences(self) -> bool:
        """Whether it may look at all sequences of a batch, so that none may join or leave it."""
        if not self.pieces:
            return False
        from . import trial

        return trial.mixes_sequences(self._target, self.pieces, self._reaches)


def _search(target: Target) -> tuple[tuple[Foreign, ...], str | None]:
    """Return the foreign code in a model that trials must prove, and why none could."""
    pieces = foreign_code(target.model)
    if target.info.quantised:  # then every row of a pass was compared by the self-test
        pieces = tuple(piece for piece in pieces if not is_of(piece.code, _QUANTISERS))
    return pieces, why_not_plain_loop(target.model)
