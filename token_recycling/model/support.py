"""May a model be accelerated? Answers are found once, and kept with the model (`facts`).

`ready` answers for a model, `why_not_code` for the code in it and a number of sequences. What a model's class and
configuration say comes first (`info`). Families that were compared when this library was made need no more. Others, and
quantized models, are tried once per machine (`trial.verdict`). Code that is not the family's own, as hooks, adapters
and overridden methods, is tried once for each form of it (`trial.why_not`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .._util.versions import installed
from .compat import attention_name
from .facts import Kept, file_of, kept_of, machine, read, shape_of, write
from .foreign import Foreign, foreign_code, listed, why_not_plain_loop
from .homes import code_beside, home_of
from .info import MASKED_ATTENTION, ModelInfo, UnsupportedModelError, model_info
from .inspection import input_device
from .target import Target

if TYPE_CHECKING:
    from .trial import Verdict

_SELF_TEST = "self-test"
_FOREIGN = "foreign code"
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
    verdict = kept.recall(_SELF_TEST)
    if verdict is not None and verdict.reason is not None and verdict.code is not kept.code:
        kept.forget(_SELF_TEST)  # what failed with a hook may pass without it
        verdict = None
    if verdict is None:
        if info.tested and not info.quantised:
            return None
        verdict = kept.get(_SELF_TEST, lambda: replace(_kept_verdict(model, info), code=kept.code))
    if verdict.reason is None:
        return None
    foreign = foreign_code(model)
    return verdict.reason if not foreign else f"{verdict.reason}; it runs {listed(foreign)}"


def tested(model: PreTrainedModel, info: ModelInfo) -> ModelInfo:
    """Return `info` of a supported model, completed by a self-test made now, which counts for later calls; never raises
    for a model.
    """
    from . import trial

    kept = kept_of(model)
    kept.forget(_SELF_TEST)
    verdict = kept.get(_SELF_TEST, lambda: replace(trial.verdict(model, info), code=kept.code))
    return replace(info, reason=verdict.reason, difference=verdict.difference, notes=(*info.notes, *verdict.notes))


def _kept_verdict(model: PreTrainedModel, info: ModelInfo) -> Verdict:
    """Return the verdict of this process or of an earlier one. A failure is not kept: other weights may pass."""
    from . import trial

    setting = None if info.quantised else _setting(model, info)
    path = None if setting is None else file_of("self-tests", setting)
    if path is not None and read(path, lambda content: content["setting"], None) == setting:
        return trial.Verdict(None)
    verdict = trial.verdict(model, info)
    if path is not None and verdict.reason is None:
        write(path, {"setting": setting, "difference": verdict.difference})
    return verdict


def _setting(model: PreTrainedModel, info: ModelInfo) -> dict[str, str] | None:
    """Return what the verdict depends on: sources and settings of all parts; None where a part has no file."""
    files = {getattr(sys.modules.get(type(part).__module__), "__file__", None) for part in model.modules()}
    sources = [Path(file).read_bytes() for file in sorted(filter(None, files))]
    if None in files:
        return None
    return {
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "shape": shape_of(model.config),
        "attention": f"{attention_name(model.config)} {info.attention}",
        "dtype": str(model.dtype),
        "machine": machine(input_device(model) or torch.device("meta")),
        "sources": hashlib.sha256(b"".join(sources)).hexdigest()[:16],
        "versions": " ".join(str(installed(name)) for name in ("torch", "transformers", "token-recycling")),
    }


# Foreign code


def why_not_code(target: Target, batch: int) -> str | None:
    """Return why foreign code in a model prevents accelerating a call with `batch` sequences, or None."""
    foreign, reason = _foreign_in(target)
    if reason is not None or not foreign:
        return reason
    from . import trial

    return trial.why_not(target, foreign, batch)


def why_not_beside(target: Target, things: Iterable[Any], cache: Cache | None) -> str | None:
    """Return why `things`, the processors, criteria and streamer of a call, prevent accelerating it, or None. `cache`:
    that of the caller, if the call has one.
    """
    beside = code_beside(things)
    if not beside:
        return None
    from . import bystanders

    return bystanders.why_not(target, _foreign_in(target)[0], beside, cache)


def mixes_sequences(target: Target) -> bool:
    """Whether foreign code in a model may look at all sequences of a batch, so that none may join or leave it."""
    foreign, _ = _foreign_in(target)
    if not foreign:
        return False
    from . import trial

    return trial.mixes_sequences(target, foreign)


def _foreign_in(target: Target) -> tuple[tuple[Foreign, ...], str | None]:
    """Return the foreign code of a model, looked up once for each form of it, and why transformers' own loop must
    decode with the model, or None.
    """
    kept = target.kept
    result: Any = kept.recall(_FOREIGN, values_matter=False)
    if result is None or result[0] is not kept.code:
        kept.forget(_FOREIGN)
        foreign = foreign_code(target.model)
        if target.info.quantised:  # then every row of a pass was compared by the self-test
            foreign = tuple(piece for piece in foreign if not _is_quantised_layer(piece))
        result = kept.code, foreign, why_not_plain_loop(target.model)
        kept.get(_FOREIGN, lambda: result, values_matter=False)
    _, foreign, reason = result
    return foreign, reason


def _is_quantised_layer(piece: Foreign) -> bool:
    return str(home_of(piece.code)).partition(".")[0] in _QUANTISERS
