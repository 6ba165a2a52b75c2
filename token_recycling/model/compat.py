"""Stand-ins for features that supported releases of transformers lack: the only module that compares releases.

Everything else is written for the newest release. Each entry names the release that brought the feature, and goes when
that release is the lowest one supported (`versions`). Where nothing can stand in, an empty class does, and `needed`
tells the user which release has the feature.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer

from .._util.versions import outside, release

_TOO_OLD = outside({"transformers": transformers.__version__, "torch": torch.__version__}, too_old=True)
if _TOO_OLD is not None:
    raise ImportError(_TOO_OLD)

_TRANSFORMERS = release(transformers.__version__)

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
    from transformers.modeling_layers import MtpModel
else:
    # Layers that keep nothing, in models of which some layers share keys or do not attend: none before.
    DummyLayer = _found("cache_utils", "DummyLayer", (5, 23))

    # Sparse attention, whose layers keep index keys.
    DynamicIndexedLayer = _found("cache_utils", "DynamicIndexedLayer", (5, 11), DynamicLayer)
    StaticIndexedLayer = _found("cache_utils", "StaticIndexedLayer", (5, 11))

    # Recurrent states, by number. Before 5.14 each family kept them in its own way.
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


class OwnLayer(cache_utils.CacheLayerMixin):
    """A cache layer of our own. Before 5.13 its capacity had another name."""

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


MARKS_NO_CACHES = _TRANSFORMERS < (5, 17)
"""Whether `generate` leaves unsaid which cache is its caller's."""


def mark_callers(cache: Any) -> None:
    """Mark the cache that a caller gives to `generate`, as transformers does itself since 5.17."""
    if isinstance(cache, Cache) and _TRANSFORMERS < (5, 17):
        cache._is_user_defined = True


def mark_made(cache: Any) -> None:
    """Mark any other cache as made by `generate`; transformers marks both since 5.17."""
    if isinstance(cache, Cache) and _TRANSFORMERS < (5, 17) and not hasattr(cache, "_is_user_defined"):
        cache._is_user_defined = False


def is_callers(cache: Cache) -> bool:
    """Whether a cache may be that of the caller of `generate`. Before 5.17 one without a mark may be."""
    return getattr(cache, "_is_user_defined", _TRANSFORMERS < (5, 17))


_ANOTHER_MODEL_BEFORE = {"doge": (5, 18)}
"""Families whose code before a release is not what trees were compared with: the self-test decides, and refuses it."""


def is_as_compared(family: str) -> bool:
    """Whether the installed release computes a family as the one that trees were compared with."""
    return _ANOTHER_MODEL_BEFORE.get(family, (0,)) <= _TRANSFORMERS


def dequantising() -> dict[str, Any]:
    """Arguments of `from_pretrained` that make it dequantise a GGUF file, as releases before `GgufConfig` always do."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
