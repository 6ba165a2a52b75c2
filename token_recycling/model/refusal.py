"""Why a model is refused, as far as its class, its configuration and the kinds of its weights show it.

A pass over a tree is exact if the logits after a token do not depend on what else is read with it. Weights that are
quantised alone change nothing in that. Activations that are quantised as the model runs do: where those of a pass share
one scale, each depends on all others, and such a model is refused. Where each token has its own scale, they are only
rounded coarsely, so that the last bit of a sum can change a text; a self-test decides.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

from .architectures import WITH_STATES, KeyBias
from .compat import LinearAttentionCacheLayerMixin, LinearAttentionLayer, lacks
from .inspection import accepts, is_compiled, parts_of
from .kv_cache import attends_to_blocks, can_be_taken
from .recurrence import mixers_of

MASKED_ATTENTION = ("sdpa", "eager")
"""Attention implementations that take a mask of any shape."""
_PACKED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def refusal(model: PreTrainedModel, config: PretrainedConfig, kept: list[Any], key_bias: KeyBias | None) -> str | None:
    """Why trees cannot be exact, or None; `kept` are the layers of the cache that the model would use."""
    name = type(model).__name__
    if config.model_type in WITH_STATES:
        reason = lacks(LinearAttentionLayer, f"{name}, whose layers keep states over the text")
        if reason is not None:
            return reason
    others = sorted({type(layer).__name__ for layer in kept if not can_be_taken(layer)})
    if others:
        return f"expected layers that keep one slot a token or a state, got {name} with {', '.join(others)}"
    stateful = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in kept)
    if stateful and any(hasattr(layer, "indexer_keys") for layer in kept):
        return f"expected attention to all keys beside states over the text, got {name}, whose index chooses among them"
    if stateful and any(map(is_compiled, parts_of(model))):
        return f"expected {name} as it is, got it compiled: layers that keep states read drafts as no graph does"
    if (stateful or getattr(model, "_is_stateful", False)) and not mixers_of(model):
        return (
            f"expected a model whose state over the text is in transformers' own cache, got {name}, which keeps it "
            "elsewhere: it cannot go back to before a rejected token"
        )
    if not (accepts(model, "past_key_values") or accepts(model, "cache_params")):
        return f"expected a model that keeps keys and values in a cache, got {name}, which takes none"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) == "all":
        return f"expected causal attention, got {name}, whose tokens see those after them"
    built_as = {getattr(part, "is_decoder", True) for part in parts_of(model)}
    if not getattr(config, "is_decoder", True) and False in built_as:
        return f"expected causal attention, got {name} built as an encoder; build it with is_decoder=True"
    if getattr(config, "alibi", False) and key_bias is None:
        return f"expected rotary or learned positions, got {name} with ALiBi of a kind that is not known"
    # Who chooses among blocks of keys does so in the masks of these alone, and looks for their names itself.
    by_name = any(attends_to_blocks(layer) for layer in kept) and config._attn_implementation not in MASKED_ATTENTION
    if by_name or any(re.search(r"FlashAttention\d", kind.__name__) for kind in set(map(type, parts_of(model)))):
        return f"expected sdpa or eager attention, got {name} built for flash; load it with attn_implementation='sdpa'"
    windows = sorted({layer.sliding_window for layer in kept if isinstance(layer, DynamicSlidingWindowLayer)})
    if len(windows) > 1:
        return f"expected one size of window for all layers, got {name} with {', '.join(map(str, windows))}"
    return None


def quantisation(model: PreTrainedModel) -> tuple[bool, str | None]:
    """Whether its weights are something else than plain tensors, or were loaded so; and the path and kind of the first
    module that gives all activations of a pass one scale, made for that pass.
    """
    quantised = getattr(model, "is_quantized", False)
    for path, module in model.named_modules():
        packed = type(module).__module__.startswith(_PACKED)
        weights = [weight for weight in module._parameters.values() if weight is not None]
        others = [weight for weight in weights if type(weight).__module__.partition(".")[0] != "torch"]
        quantised = quantised or packed or bool(others)
        kinds = [type(weight).__name__ for weight in others if _shares(weight)]
        if kinds or (packed and _is_dynamic(module)):
            return True, f"{path}, a {type(module).__name__}" + "".join(f" of {kind}" for kind in kinds[:1])
    return quantised, None


def _is_dynamic(module: torch.nn.Module) -> bool:
    """Find modules of torch.ao in int8; those of float16 leave activations as they are."""
    if not type(module).__module__.startswith(tuple(f"{name}.dynamic" for name in _PACKED)):
        return False
    return getattr(getattr(module, "_packed_params", module), "dtype", torch.qint8) != torch.float16


def _shares(weight: torch.Tensor) -> bool:
    """Find tensors of torchao that say how activations multiplied by them are quantised."""
    kind = type(getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)).__name__
    return kind == "PerTensor" and getattr(weight, "act_quant_scale", None) is None
