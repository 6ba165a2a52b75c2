"""Stand-ins for what releases of transformers and torch lack: the one place that knows.

Everything else is written for the newest release. What a lower one within the range (`versions`) does not have is an
entry here, with the release that brought it. Where nothing can stand in, there is a class that nothing is of, and
`needed` tells the user which release has it. An entry goes when the lowest release has it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicLayer

from .._util.versions import outside, release

_TOO_OLD = outside({"transformers": transformers.__version__, "torch": torch.__version__}, too_old=True)
if _TOO_OLD is not None:
    raise ImportError(_TOO_OLD)

_TRANSFORMERS = release(transformers.__version__)
_TORCH = release(torch.__version__)

CACHE = "cache" if _TRANSFORMERS >= (5, 24) else "past_key_values"
"""The argument of forward passes, and the field of their outputs, with the KV cache; renamed in 5.24."""


def cache_argument(arguments: Collection[str]) -> str | None:
    """Return which of a forward pass's arguments takes the cache, or None."""
    return next((name for name in (CACHE, "cache_params", "past_key_values") if name in arguments), None)


def _found(module: str, name: str, since: tuple[int, int], base: type = object) -> Any:
    """Import what transformers has since a release, or make a class, below `base`, that nothing is of."""
    if since <= _TRANSFORMERS:
        return getattr(import_module(f"transformers.{module}"), name)
    return type(name, (base,), {"__module__": __name__, "since": since})


def lacks(kind: Any, what: str) -> str | None:
    """Why `what` needs a later release, where `kind` is of this module and not of transformers; else None."""
    if kind.__module__ != __name__:
        return None
    first = ".".join(map(str, kind.since))
    return f"{what} needs transformers >= {first}, got {transformers.__version__}"


def needed(kind: Any, what: str) -> None:
    """Raises ValueError with that reason, if there is one."""
    if reason := lacks(kind, what):
        raise ValueError(reason)


if TYPE_CHECKING:
    from transformers.cache_utils import (
        DummyLayer,
        DynamicIndexedLayer,
        LinearAttentionAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer,
        LinearAttentionCacheLayerMixin,
        LinearAttentionLayer,
        MtpCache,
        StaticIndexedLayer,
    )
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
    from transformers.generation.logits_process import TopHLogitsWarper
    from transformers.modeling_layers import MtpModel
else:
    # Layers that keep nothing, in models of which some layers share keys or do not attend: none before.
    DummyLayer = _found("cache_utils", "DummyLayer", (5, 23))

    # Sparse attention, whose layers keep index keys.
    DynamicIndexedLayer = _found("cache_utils", "DynamicIndexedLayer", (5, 11), DynamicLayer)
    StaticIndexedLayer = _found("cache_utils", "StaticIndexedLayer", (5, 11))

    # Recurrent states, by number. Before, each family kept them in its own way.
    LinearAttentionCacheLayerMixin = _found("cache_utils", "LinearAttentionCacheLayerMixin", (5, 14))
    LinearAttentionLayer = _found("cache_utils", "LinearAttentionLayer", (5, 14))
    LinearAttentionAndFullAttentionLayer = _found("cache_utils", "LinearAttentionAndFullAttentionLayer", (5, 14))
    LinearAttentionAndSlidingWindowAttentionLayer = _found(
        "cache_utils", "LinearAttentionAndSlidingWindowAttentionLayer", (5, 14)
    )

    # Multi-token prediction: since 5.14, with a cache that can go back, as the drafter needs it, since 5.15.
    MtpModel = _found("modeling_layers", "MtpModel", (5, 15))
    MtpCache = _found("cache_utils", "MtpCache", (5, 15))

    # DFlash assistants: since 5.15, with hidden states by number, as the drafter gives them, since 5.23.
    DFlashTokenCandidateGenerator = _found("generation.candidate_generator", "DFlashTokenCandidateGenerator", (5, 23))

    # A processor: none before.
    TopHLogitsWarper = _found("generation.logits_process", "TopHLogitsWarper", (5, 0))


class OwnLayer(cache_utils.CacheLayerMixin):
    """A kind of layer that is not transformers' own. Before 5.13 its room had another name."""

    if _TRANSFORMERS < (5, 13):

        def get_max_cache_shape(self) -> int:
            return self.get_max_length()


def left_by_crop(asked: int, held: int) -> int:
    """Return how many of `held` slots `crop(asked)` leaves. Before 5.15 a positive number said how many to leave; 0
    leaves all since 5.14.
    """
    if asked < 0 or (asked == 0 and _TRANSFORMERS >= (5, 14)):
        return max(0, held + asked)
    if _TRANSFORMERS < (5, 15):
        return min(asked, held)
    if asked > 0:
        raise ValueError(f"number of slots to forget must be <= 0, got {asked}")
    return held


def write_behind(cache: Cache, held: int, index: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Appends states (batch, heads, n, size) to a layer of a static cache that holds `held` slots. Before 5.4 it was
    told where they go, and took slots of zeros for empty ones; since then it counts.
    """
    if _TRANSFORMERS >= (5, 4):
        cache.update(keys, values, index)
        return
    places = torch.arange(held, held + keys.shape[2], device=keys.device)
    # The slots of padding, which nothing attends to, hold ones.
    filled = keys.masked_fill(~keys.any(dim=-1, keepdim=True), 1)
    cache.update(filled, values, index, {"cache_position": places})


def is_callers(cache: Cache) -> bool:
    """Whether a cache may be that of the caller of `generate`. Before 5.17 there was no mark of it."""
    return _TRANSFORMERS < (5, 17) or getattr(cache, "_is_user_defined", False)


_ANOTHER_MODEL_BEFORE = {"doge": (5, 18)}
"""Families whose code before a release is not what trees were compared with: the self-test decides, and refuses it."""


def is_as_compared(family: str) -> bool:
    """Whether the installed release computes a family as the one that trees were compared with."""
    return _ANOTHER_MODEL_BEFORE.get(family, (0,)) <= _TRANSFORMERS


def with_cache(model: PreTrainedModel, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return what `generate` hands to its loop. In 5.0 it left a cache of the usual kind for the model to make."""
    usual = (
        (5, 0) <= _TRANSFORMERS < (5, 1) and model_kwargs.get("use_cache") and model._supports_default_dynamic_cache()
    )
    if not usual or model_kwargs.get("past_key_values") is not None:
        return model_kwargs
    return {**model_kwargs, "past_key_values": DynamicCache(config=model.config.get_text_config(decoder=True))}


def rotary(config: PretrainedConfig) -> dict[str, Any]:
    """Return what a configuration says of rotary positions: `rope_type`, `rope_theta` and what a scaling needs, or such
    mappings by type of layer. Before 5.0 the base stood by itself, and the type went by two names.
    """
    if _TRANSFORMERS >= (5, 0):
        return getattr(config, "rope_parameters", None) or {}
    scaling = dict(getattr(config, "rope_scaling", None) or {})
    kind = scaling.pop("type", None)
    at = getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
    return {
        "rope_type": kind or "default",
        "rope_theta": getattr(config, "rope_theta", None),
        **({"original_max_position_embeddings": at} if "longrope" in (kind, scaling.get("rope_type")) else {}),
        **scaling,
    }


def of_rotary(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a configuration for such a mapping."""
    if _TRANSFORMERS >= (5, 0):
        return {"rope_parameters": dict(parameters)}
    scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
    default = scaling["rope_type"] == "default"
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": None if default else scaling}


def dequantising() -> dict[str, Any]:
    """Arguments of `from_pretrained` that make it dequantise a GGUF file, as releases before `GgufConfig` always do."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def precision_options() -> list[Any]:
    """Return torch's settings of precision: one for all devices before 2.9, none for 16-bit sums before 2.7."""
    matmul = torch.backends.cuda.matmul
    sums = [matmul.allow_fp16_accumulation] if _TORCH >= (2, 7) else []
    if _TORCH < (2, 9):
        return [torch.get_float32_matmul_precision(), matmul.allow_tf32, *sums]
    backends: Any = torch.backends
    return [backends.fp32_precision, backends.mkldnn.matmul.fp32_precision, matmul.fp32_precision, *sums]
