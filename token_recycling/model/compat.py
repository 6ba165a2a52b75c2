"""Parts that depend on releases of transformers and torch: private names, and stand-ins for features of later releases.

No other module compares releases, or uses a private name of either library (`PRIVATE`): a test fails if one is used
elsewhere, or is missing in the installed release.

All other code is written for the newest release. Each entry names the release that introduced the feature, and is
removed when that release is the lowest one supported (`versions`). Where no stand-in is possible, an empty class takes
the place, and `needed` names the release that has the feature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from importlib import import_module
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import Cache, DynamicLayer

from .._util.versions import outside, release

_TOO_OLD = outside({"transformers": transformers.__version__, "torch": torch.__version__}, too_old=True)
if _TOO_OLD is not None:
    raise ImportError(_TOO_OLD)

_TRANSFORMERS = release(transformers.__version__)

CACHE = "cache" if _TRANSFORMERS >= (5, 24) else "past_key_values"
"""The argument of forward passes, and the field of their outputs, that holds the KV cache; renamed in 5.24."""


def cache_argument(arguments: Collection[str]) -> str | None:
    """Return the argument of a forward pass that takes the cache, or None."""
    return next((name for name in (CACHE, "cache_params", "past_key_values") if name in arguments), None)


def _since(module: str, name: str, since: tuple[int, int], base: type = object) -> Any:
    """Import an object that transformers has since a release, or else make a subclass of `base` without instances."""
    if since <= _TRANSFORMERS:
        return getattr(import_module(f"transformers.{module}"), name)
    return type(name, (base,), {"__module__": __name__, "since": since})


def why_not_here(cls: Any, what: str) -> str | None:
    """Return why `what` needs a later release, if `cls` is of this module and not of transformers; else None."""
    if cls.__module__ != __name__:
        return None
    first = ".".join(map(str, cls.since))
    return f"{what} needs transformers >= {first}, got {transformers.__version__}"


def needed(cls: Any, what: str) -> None:
    """Raise ValueError with the reason from `why_not_here`, if there is one."""
    if reason := why_not_here(cls, what):
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
    # Layers that keep nothing, in models where some layers share keys or do not attend; earlier releases have none.
    DummyLayer = _since("cache_utils", "DummyLayer", (5, 23))

    # Sparse attention, whose layers keep index keys.
    DynamicIndexedLayer = _since("cache_utils", "DynamicIndexedLayer", (5, 11), DynamicLayer)
    StaticIndexedLayer = _since("cache_utils", "StaticIndexedLayer", (5, 11))

    # Recurrent states, by number. Before 5.14 each family kept them in its own way.
    LinearAttentionCacheLayerMixin = _since("cache_utils", "LinearAttentionCacheLayerMixin", (5, 14))
    LinearAttentionLayer = _since("cache_utils", "LinearAttentionLayer", (5, 14))
    LinearAttentionAndFullAttentionLayer = _since("cache_utils", "LinearAttentionAndFullAttentionLayer", (5, 14))
    LinearAttentionAndSlidingWindowAttentionLayer = _since(
        "cache_utils", "LinearAttentionAndSlidingWindowAttentionLayer", (5, 14)
    )

    # Multi-token prediction: since 5.14; layer by layer, as the drafter needs it, since 5.20.
    MtpModel = _since("modeling_layers", "MtpModel", (5, 20))
    MtpCache = _since("cache_utils", "MtpCache", (5, 20))

    # DFlash assistants: since 5.15; with numbered hidden states, as the drafter provides them, since 5.23.
    DFlashTokenCandidateGenerator = _since("generation.candidate_generator", "DFlashTokenCandidateGenerator", (5, 23))


class OwnLayer(cache_utils.CacheLayerMixin):
    """Base class of our own cache layers. Before 5.13 the method for its capacity had another name."""

    if _TRANSFORMERS < (5, 13):

        def get_max_cache_shape(self) -> int:
            return self.get_max_length()


def left_by_crop(asked: int, slots: int) -> int:
    """Return how many of `slots` slots `crop(asked)` leaves. Before 5.15 a positive number is the number to leave; 0
    leaves all since 5.14.
    """
    if asked < 0 or (asked == 0 and _TRANSFORMERS >= (5, 14)):
        return max(0, slots + asked)
    if _TRANSFORMERS < (5, 15):
        return min(asked, slots)
    if asked > 0:
        raise ValueError(f"number of slots to forget must be <= 0, got {asked}")
    return slots


MARKS_NO_CACHES = _TRANSFORMERS < (5, 17)
"""Whether `generate` does not mark its caller's cache."""
CALLERS = "_is_user_defined"
"""The attribute of a cache that is true if the caller of `generate` passed the cache."""


def mark_callers(cache: Any) -> None:
    """Mark a caller's cache, as `generate` does itself since 5.17."""
    if isinstance(cache, Cache):
        setattr(cache, CALLERS, True)


_ANOTHER_MODEL_BEFORE = {"doge": (5, 18), "git": (5, 18)}
"""Families whose code before a release differs from the one that trees were compared with: the self-test refuses it."""


def is_as_compared(family: str) -> bool:
    """Return whether the installed release computes a family as the one that trees were compared with."""
    return _ANOTHER_MODEL_BEFORE.get(family, (0,)) <= _TRANSFORMERS


def dequantizing() -> dict[str, Any]:
    """Return arguments of `from_pretrained` that dequantize a GGUF file; releases before `GgufConfig` always do."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


PRIVATE = {
    "transformers.GenerationMixin._sample": "the one method that a model's accelerated class overrides",
    "transformers.PretrainedConfig._attn_implementation": "the attention that the user chose",
    "transformers.Cache._is_user_defined": "the mark of a cache passed by the caller of `generate`",
    "transformers.GenerationMixin._prepare_position_ids_for_generation": "whether positions may have several axes",
    "torch.Tensor._version": "how often weights were written to",
    "torch.ops.mkldnn._reorder_linear_weight": "weights packed for few rows, otherwise used only in compiled graphs",
    "torch.ops.mkldnn._linear_pointwise": "products with packed weights",
    "torch.library._impls": "replaced torch kernels, which no module shows",
    "torch.overrides._get_current_function_mode_stack": "modes that captured passes would bypass",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": "modes that captured passes would bypass",
}
"""Private names of transformers and torch in use, only in this module, and the reason; `_sample` is also the name of
the method that overrides it.
"""

LOOP = "_sample"
"""The method in which `generate` decodes."""


def prepares_positions(cls: type[GenerationMixin]) -> bool:
    """Return whether a model class prepares position ids itself, which may then have several axes."""
    return cls._prepare_position_ids_for_generation is not GenerationMixin._prepare_position_ids_for_generation


def plain_loop() -> Callable[..., Any]:
    """Return transformers' own decoding loop."""
    return GenerationMixin._sample


def methods_of_the_loop() -> list[str]:
    """Return the names of the model methods that transformers' own decoding loop consists of or calls."""
    called = inspect.unwrap(plain_loop()).__code__.co_names
    return [LOOP, *(name for name in called if isinstance(vars(GenerationMixin).get(name), FunctionType))]


def chosen_experts(model: PreTrainedModel) -> dict[str, str | None] | None:
    """Return how a model and its parts compute their experts, by part; None if the release lacks this setting."""
    return model.get_experts_implementation() if hasattr(model, "get_experts_implementation") else None


attention_name: Callable[[PretrainedConfig], str] = attrgetter("_attn_implementation")
"""Return the attention implementation that a configuration names."""


def _attribute_of(add: Callable[[torch.nn.Module], Any]) -> str:
    """Return the name of the attribute in which torch stores the object that `add` adds to a module."""
    module = torch.nn.Module()
    add(module)
    return next(name for name, value in vars(module).items() if isinstance(value, dict) and value)


CHILDREN = _attribute_of(lambda module: module.add_module("child", torch.nn.Module()))
PARAMETERS = _attribute_of(lambda module: module.register_parameter("weight", torch.nn.Parameter(torch.zeros(0))))
BUFFERS = _attribute_of(lambda module: module.register_buffer("buffer", torch.zeros(0)))
HOOKS_AFTER = _attribute_of(lambda module: module.register_forward_hook(lambda *_: None))
HOOKS_BEFORE = _attribute_of(lambda module: module.register_forward_pre_hook(lambda *_: None))


def forward_hooks(module: torch.nn.Module) -> Iterator[Callable[..., Any]]:
    """Yield the hooks before and after a module's forward pass."""
    for name in (HOOKS_AFTER, HOOKS_BEFORE):
        yield from list(vars(module)[name].values())


version = attrgetter("_version")
"""Return how many operations have written to a tensor; raises RuntimeError for an inference tensor."""


def packed_types() -> set[torch.dtype]:
    """Return the dtypes of weights that this build of torch packs for this CPU; empty if there are none."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return set()
    try:
        packed_weight(torch.zeros(16, 16, dtype=torch.bfloat16), 1)
    except RuntimeError:  # the CPU lacks the instructions
        return {torch.float32}
    return {torch.float32, torch.bfloat16}


def packed_weight(weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Pack a weight (outputs, inputs) for products of about `rows` rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def packed_product() -> Callable[..., torch.Tensor]:
    """Return the operator that multiplies rows by a packed weight."""
    return torch.ops.mkldnn._linear_pointwise.default


KERNELS: Set[str] = torch.library._impls
"""Kernels of torch's operators that are registered through `torch.library` now, as `aten/silu/CPU`."""
KERNELS_AS_INSTALLED = frozenset(KERNELS)


def replaced_kernels() -> list[str]:
    """Return the kernels of torch's operators registered through `torch.library` since this module was imported, except
    those that only infer shapes, and those that torch adds for `torch.vmap` when masks of batches first need it.
    """
    kernels = (name.split("/") for name in KERNELS - KERNELS_AS_INSTALLED)
    run = (each for each in kernels if each[0] == "aten" and not each[-1].startswith(("Meta", "FuncTorch")))
    return sorted(map("/".join, run))


MODES: tuple[Callable[[], Sequence[Any]], ...] = (_get_current_function_mode_stack, _get_current_dispatch_mode_stack)
"""Functions that return the torch modes active in this thread, one per kind of mode."""
