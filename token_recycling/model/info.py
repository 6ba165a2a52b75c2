"""Facts about a model, collected once by `model_info(model)` from its class, its configuration and the types of its
modules and weights. Nothing runs.

Tree verification is exact if the logits after a token depend only on the sequence up to it. Attention must follow the
mask and the positions it is given, and recurrent layers must keep their state in transformers' cache (`recurrence`).
`architectures` lists the families that need more. Quantized weights change nothing; activations quantized at run time
do. If all rows of a forward pass share one scale, each row depends on the others, and the model is refused. If every
token has its own scale, coarse rounding can still change the output; the self-test decides (`self_test`).

Cost: a few milliseconds, again after each change of the model (`facts`).
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer

from .architectures import (
    EXCEPTIONS,
    READ_ON,
    STATES_ELSEWHERE,
    TESTED,
    WITH_STATES,
    KeyBias,
    LengthThreshold,
    Needs,
    Reach,
    changes_frequencies,
    index_threshold,
    rotary_threshold,
)
from .compat import (
    DynamicIndexedLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    attention_name,
    cache_argument,
    is_as_compared,
    why_not_here,
)
from .facts import Facts, facts_of
from .inspection import arguments_of, input_device
from .kv_cache import CacheLayout, attends_to_blocks, can_be_taken, layout_of, window_of
from .origin import is_own
from .parts import is_compiled, parts_of

MASKED_ATTENTION = ("sdpa", "eager")
"""Attention implementations that take a mask of any shape."""
_HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Types of layers with attention and a recurrent state, and the types of their attention."""
_LAYOUT = ("layer_types", "sliding_window", "attention_chunk_size")
"""Settings by which a cache drops tokens, whether or not the model's own code reads them."""
_PACKED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


class UnsupportedModelError(ValueError):
    """The model, or the way it was called, cannot be accelerated without risking its output."""


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a model: how it verifies trees, or why it cannot. A refused model has only the first three fields."""

    name: str
    """Name of its class."""
    family: str
    """`model_type` of the configuration of its text decoder."""
    reason: str | None = None
    """Why it is refused; None if it is supported."""
    how: str = "not at all"
    """Short description of how trees are verified."""
    tested: bool = False
    """Whether the tests of this library compare the family with linear decoding."""
    quantized: bool = False
    """Whether its weights are other than the plain tensors that the family was compared with."""
    attention: str = "sdpa"
    """The attention implementation of accelerated calls."""
    named_attention: bool = True
    """Whether the model looks up attention by name, so that another function can replace it."""
    notes: tuple[str, ...] = ()
    """Further notes for the user."""
    difference: float | None = None
    """Largest difference between the logits of a tree and of linear decoding in a self-test."""
    no_fast_path: str | None = None
    """Why steps of this model cannot be captured (docs/how-it-works.md), as far as checked; None if they can."""
    layers: Mapping[str, Reach] = field(default_factory=dict, repr=False)
    """Reach by layer type."""
    cache_layout: CacheLayout = field(default=(), repr=False)
    """Layers of its own empty cache."""
    length_threshold: LengthThreshold | None = None
    key_bias: KeyBias | None = None
    branches: bool = True
    """Whether a tree may branch; if not, drafts are chains, whose nodes lie in the cache in order."""
    counts_slots: bool = False
    """Whether positions, windows or biases are counted in cache slots, empty ones included."""
    recurrent: bool = False
    """Whether it has recurrent layers."""
    sees_padding: bool = False
    """Whether `generate` lets its tokens attend to padding."""
    reads_on: bool = True
    """Whether reading several tokens after a cache equals reading them one by one."""

    @property
    def supported(self) -> bool:
        return self.reason is None

    @property
    def why_not_batch(self) -> str | None:
        """Why batches and padded sequences cannot be decoded; None if they can."""
        if self.length_threshold is not None:
            return f"{self.name} decodes one sequence without padding at a time: {self.length_threshold.why}"
        if not self.branches:
            return f"{self.name} decodes one sequence without padding at a time: its positions are cache slots"
        if self.key_bias is not None and self.key_bias.shared:
            return f"{self.name} decodes one sequence without padding at a time: all sequences share one ALiBi"
        return None

    def why_not_read_on(self, cached: int, length: int) -> str | None:
        """Return why the rest of `length` tokens cannot be read after the first `cached` ones, or None."""
        if self.reads_on or not cached or length - cached == 1:
            return None
        return (
            f"the cache must hold all but the last of {length} tokens, got one of {cached}: {self.name} reads several "
            "tokens after a cache differently from single ones; pass all tokens without a cache"
        )

    def fits(self, length: int, nodes: int) -> bool:
        """Return whether a tree of `nodes` nodes is exact after `length` tokens."""
        return nodes == 1 or self.length_threshold is None or self.length_threshold.fits(length, nodes)

    def as_dict(self) -> dict[str, object]:
        """Return the facts in a form for JSON."""
        plain = ("family", "supported", "how", "reason", "tested", "attention", "difference", "no_fast_path")
        threshold = None if self.length_threshold is None else self.length_threshold.at
        values = {name: getattr(self, name) for name in plain}
        return {"model": self.name, **values, "threshold": threshold, "notes": list(self.notes)}


def model_info(model: PreTrainedModel, facts: Facts | None = None) -> ModelInfo:
    """Return the facts about a model without running it; they are cached until its parts, weights or configuration
    change. Never raises for a model. `facts`: the model's, if the caller already has them.
    """
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        name = type(model).__name__
        return ModelInfo(name, "", f"{name} is not a transformers model that generates text; {_remedy_for(model)}")
    facts = facts_of(model) if facts is None else facts
    return facts.get("info", lambda: _examined(model), of="form")


def _remedy_for(wrapper: Any) -> str:
    """Return a remedy for an object that is not a transformers model: which model inside it to pass instead."""
    is_module = isinstance(wrapper, torch.nn.Module)
    for path, inner in wrapper.named_modules() if is_module else getattr(wrapper, "__dict__", {}).items():
        if isinstance(inner, PreTrainedModel) and inner.can_generate():
            return f"pass the {type(inner).__name__} in its .{path}: calls of the wrapper are then accelerated too"
    return "load it with AutoModelForCausalLM"


def _examined(model: PreTrainedModel) -> ModelInfo:
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    family = config.model_type
    if model.config.is_encoder_decoder:
        return ModelInfo(name, family, f"{name} is an encoder-decoder model; only decoder-only models are supported")
    if not hasattr(config, "num_hidden_layers"):
        several = "it has several for bytes and patches"
        return ModelInfo(name, family, f"{name} has no single stack of layers: {several}")
    parts, arguments, cached = parts_of(model), arguments_of(model), DynamicCache(config=config).layers
    needs = EXCEPTIONS.get(family, Needs())
    key_bias = needs.key_bias(config)
    recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cached)
    quantized, sharing = _quantization(model)
    reason = (
        _why_not_cache(name, config, cached)
        or _why_not_order(name, cached, parts)
        or _why_not_states(model, recurrent, parts)
        or _why_not_parts(name, config, cached, key_bias, parts, arguments)
        or _why_not_flex(name, config, input_device(model))
        or _why_not_rotary(name, config, parts)
        or _why_not_configs(name, config, parts)
    )
    if reason is None and sharing is not None:
        reason = (
            f"{depends_on_rows(name)}: activations of a pass share one scale in {sharing}; quantize only the weights"
        )
    if reason is not None:
        return ModelInfo(name, family, reason)
    indexed = any(type(layer) is DynamicIndexedLayer for layer in cached)
    threshold = index_threshold(config) if indexed else needs.length_threshold(config) or rotary_threshold(config)
    layers = _reaches(config)
    attends = any(isinstance(layer, CacheLayerMixin) for layer in cached)
    branches = not needs.slots and (not attends or key_bias is not None or "position_ids" in arguments)
    how = _how(layers, key_bias) if attends else ""
    attention, notes = attention_name(config), []
    if attention not in MASKED_ATTENTION:
        used = model.get_correct_attn_implementation(None)
        notes.append(f"{attention} does not support tree masks: accelerated calls use {used}")
        attention = used
    if threshold is not None:
        notes.append(_where(threshold))
    if not branches:
        notes.append("its positions are slots of its cache: only the first path of a tree is drafted")
    return ModelInfo(
        name,
        family,
        how=", ".join(filter(None, [how, "states by node" * recurrent, "paths only" * (not branches)])),
        # A text decoder inside another model is called through that model, which is not covered.
        tested=family in TESTED and is_as_compared(family) and model.config is config,
        quantized=quantized,
        attention=attention,
        named_attention=_looks_attention_up(parts) and not indexed,
        notes=tuple(notes),
        layers=layers,
        cache_layout=layout_of(cached),
        length_threshold=threshold,
        key_bias=key_bias,
        branches=branches,
        counts_slots=needs.slots or (key_bias is not None and key_bias.in_mask),
        recurrent=recurrent,
        sees_padding=needs.sees_padding,
        reads_on=not recurrent or family in READ_ON,
    )


# Why a model is refused


def _why_not_cache(name: str, config: PretrainedConfig, cached: Sequence[Any]) -> str | None:
    """Return why accepted slots cannot be kept in `cached`, the cache layers that the model would use, or None."""
    if config.model_type in WITH_STATES:
        reason = why_not_here(LinearAttentionLayer, f"{name}, a model with recurrent states,")
        if reason is not None:
            return reason
    unread = [key for key in _LAYOUT if getattr(config, key, None) and not _declares(type(config), key)]
    if unread and any(map(window_of, cached)):
        return f"{name} attends to tokens that its cache drops: its code does not read {unread[0]}; remove that setting"
    untaken = [layer for layer in cached if not can_be_taken(layer)]
    others = sorted({type(layer).__name__ for layer in untaken})
    if any(hasattr(layer, "compress_rate") for layer in untaken):
        return (
            f"{name} has layers that fold groups of tokens into one entry of the cache ({', '.join(others)}): branches "
            "of a draft would share an entry, and rejected tokens would stay in it"
        )
    if others:
        return f"{name} has layers that keep neither one slot per token nor a state: {', '.join(others)}"
    if getattr(config, "ple_layer_ids", None):
        return f"{name} has n-gram embeddings, whose convolution would read the nodes of a draft as one sequence"
    return None


def _why_not_order(name: str, cached: Sequence[Any], parts: Sequence[torch.nn.Module]) -> str | None:
    """Return why layers may not match the configuration, or None: masks depend on the place of a layer, its cache on
    the number that it was made with. The first cache layer with slots counts the tokens read.
    """
    several_types = len({(type(layer), window_of(layer)) for layer in cached}) > 1
    stacks = [[*map(_numbers_of, layers)] for layers in parts if isinstance(layers, torch.nn.ModuleList) and layers]
    for stack in stacks:
        for place, numbers in enumerate({number for _, number in layer} for layer in stack):
            if several_types and numbers and place not in numbers:
                return (
                    f"{name} has layers of several types, but layer {min(numbers)} is in place {place}; renumber them"
                )
        (((_, number), times),) = Counter(itertools.chain([(None, -1)], *stack)).most_common(1)
        if times > 1:
            return f"{name} has {times} layers of number {number}, which would share a cache; renumber them"
    numbers = {number for stack in stacks for layer in stack for _, number in layer}
    counting = next((place for place, layer in enumerate(cached) if isinstance(layer, CacheLayerMixin)), 0)
    if numbers and counting not in numbers:
        return f"{name} has no layer of number {counting}; renumber its layers"
    return None


def _numbers_of(layer: torch.nn.Module) -> set[tuple[type, int]]:
    """Return the layer numbers that parts of a layer were made with, and the classes of the parts."""
    numbers = ((type(part), vars(part).get("layer_idx")) for part in layer.modules())
    return {(kind, number) for kind, number in numbers if isinstance(number, int) and number >= 0}


def _declares(config: type[PretrainedConfig], key: str) -> bool:
    """Return whether a configuration class has or derives a setting of this name; one outside transformers may have
    any.
    """
    fields = inspect.signature(config.__init__).parameters
    derived = inspect.unwrap(config.__post_init__).__code__.co_names
    declared = key in fields or key in derived or key in config.attribute_map or hasattr(config, key)
    return declared or not is_own(config.__module__)


def _why_not_states(model: PreTrainedModel, recurrent: bool, parts: Collection[torch.nn.Module]) -> str | None:
    name = type(model).__name__
    if recurrent and any(map(is_compiled, parts)):
        return (
            f"{name} is compiled and has recurrent layers, which cannot read drafts in compiled graphs; load it "
            "uncompiled"
        )
    if recurrent or model.config.model_type in STATES_ELSEWHERE:
        from .recurrence import keeps_state

        if any(map(keeps_state, parts)):
            return None
        return f"{name} keeps its recurrent state outside transformers' cache: it cannot roll back rejected tokens"
    return None


def _why_not_parts(
    name: str,
    config: PretrainedConfig,
    cached: Sequence[Any],
    key_bias: KeyBias | None,
    parts: Collection[torch.nn.Module],
    arguments: frozenset[str],
) -> str | None:
    if cache_argument(arguments) is None:
        return f"{name} takes no KV cache"
    built_as = {getattr(part, "is_decoder", True) for part in parts}
    if not getattr(config, "is_decoder", True) and False in built_as:
        return f"{name} is built as an encoder; build it with is_decoder=True"
    layers = (part for part in parts if "layer_idx" in vars(part) and type(vars(part).get("config")) is type(config))
    causal = all(getattr(part, "is_causal", True) for part in (config, *layers))
    key = "use_bidirectional_attention"
    if not causal or (getattr(config, key, None) in (True, "all") and _declares(type(config), key)):
        return f"{name} is not causal: its tokens attend to later ones"
    if getattr(config, "alibi", False) and key_bias is None:
        return f"{name} uses an unknown kind of ALiBi"
    # A model that chooses blocks of keys does so in the masks of these implementations only.
    by_name = any(map(attends_to_blocks, cached)) and attention_name(config) not in MASKED_ATTENTION
    if by_name or any(re.search(r"FlashAttention\d", cls.__name__) for cls in set(map(type, parts))):
        return f"{name} is built for flash attention; load it with attn_implementation='sdpa'"
    windows = sorted({layer.sliding_window for layer in cached if isinstance(layer, DynamicSlidingWindowLayer)})
    if len(windows) > 1 or (windows and windows[0] < 2):  # with a window of 1 transformers' cache drops nothing
        return f"{name} has sliding windows of several sizes, or of one token: {', '.join(map(str, windows))}"
    return None


def _why_not_flex(name: str, config: PretrainedConfig, device: torch.device | None) -> str | None:
    """Return why flex_attention is refused, or None: on a CPU its logits differ from sdpa's after a few tokens."""
    if attention_name(config) != "flex_attention" or device is None or device.type != "cpu":
        return None
    return f"{name} uses flex_attention, whose results are wrong on a CPU; call model.set_attn_implementation('sdpa')"


def _why_not_rotary(name: str, config: PretrainedConfig, parts: Collection[torch.nn.Module]) -> str | None:
    """Return which rotary module is refused, or None: its own configuration, perhaps an older one, sets its scaling."""
    threshold = rotary_threshold(config)
    for part in parts:
        kinds, own = getattr(part, "rope_type", None), getattr(part, "config", None)
        of_layers = kinds.values() if isinstance(kinds, dict) else [kinds]
        if not isinstance(own, PretrainedConfig) or not any(changes_frequencies(str(kind)) for kind in of_layers):
            continue
        at = rotary_threshold(own.get_text_config(decoder=True))
        # Dynamic scaling reads an attribute, which a user may have set.
        dynamic = any("dynamic" in str(kind) for kind in of_layers)
        if threshold is None or at != threshold or (dynamic and part.original_max_seq_len != threshold.at):
            return f"{name} has a {type(part).__name__} whose rotary scaling is not the configured one"
    return None


def _why_not_configs(name: str, config: PretrainedConfig, parts: Collection[torch.nn.Module]) -> str | None:
    """Return which part is refused, or None: parts attend by configurations that a user may have replaced."""
    for part in parts:
        own = vars(part).get("config")
        if own is config or type(own) is not type(config):
            continue
        if attention_name(own) != attention_name(config) or _reaches(own) != _reaches(config):
            return f"{name} has a {type(part).__name__} whose attention settings differ from the model's"
    return None


def depends_on_rows(name: str) -> str:
    """Return the start of the reason for refusing a model whose logits depend on more than the sequence before them."""
    return f"the logits of {name} depend on how many tokens are read at once"


def _quantization(model: PreTrainedModel) -> tuple[bool, str | None]:
    """Return whether its weights are, or were loaded as, other than plain tensors; and the path and class of the first
    module that gives all activations of a pass one scale, computed for that pass.
    """
    quantized = getattr(model, "is_quantized", False)
    for path, module in model.named_modules():
        packed = type(module).__module__.startswith(_PACKED)
        weights = [*module.parameters(recurse=False)]
        others = [weight for weight in weights if type(weight).__module__.partition(".")[0] != "torch"]
        quantized = quantized or packed or bool(others)
        classes = [type(weight).__name__ for weight in others if _shares(weight)]
        if classes or (packed and _is_dynamic(module)):
            return True, f"{path}, a {type(module).__name__}" + "".join(f" of {name}" for name in classes[:1])
    return quantized, None


def _is_dynamic(module: torch.nn.Module) -> bool:
    """Return whether it is a dynamic int8 module of torch.ao; those of float16 do not quantize activations."""
    if not type(module).__module__.startswith(tuple(f"{name}.dynamic" for name in _PACKED)):
        return False
    dtypes = [getattr(part, "dtype", None) for part in (module, *module.children())]
    return torch.float16 not in dtypes


def _shares(weight: torch.Tensor) -> bool:
    """Return whether it is a torchao tensor that quantizes activations with one scale computed for each pass."""
    granularity = type(getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)).__name__
    return granularity == "PerTensor" and getattr(weight, "act_quant_scale", None) is None


# How it attends


def _looks_attention_up(parts: Collection[torch.nn.Module]) -> bool:
    """Return whether layers look up their attention by name, under which another function may be registered."""
    modules = {type(part).__module__ for part in parts}
    return any(hasattr(sys.modules.get(name), "ALL_ATTENTION_FUNCTIONS") for name in modules)


def _reaches(config: PretrainedConfig) -> dict[str, Reach]:
    """Return the reach of each layer type, by the name that the model's forward uses for it."""
    reaches: dict[str, Reach] = {}
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    for name in dict.fromkeys(types):
        if name in _HYBRID:  # such a layer's attention goes by either name
            reach = Reach("sliding", config.sliding_window) if name == "hybrid_sliding" else Reach()
            reaches |= {name: reach, _HYBRID[name]: reach, "linear_attention": Reach()}
        elif name == "sliding_attention" or (name is None and getattr(config, "sliding_window", None)):
            reaches[name or "sliding_attention"] = Reach("sliding", config.sliding_window)
        elif name == "chunked_attention" or (name is None and getattr(config, "attention_chunk_size", None)):
            reaches[name or "chunked_attention"] = Reach("chunked", config.attention_chunk_size)
        else:
            reaches[name or "full_attention"] = Reach()
    return reaches


def _how(layers: Mapping[str, Reach], key_bias: KeyBias | None) -> str:
    if key_bias is not None:
        return "one mask, ALiBi by position"
    (first, *others) = set(layers.values())
    if others:
        return "a mask per layer type"
    return "one mask" if first == Reach() else f"one mask, {first.kind} by {first.size}"


def _where(threshold: LengthThreshold) -> str:
    if threshold.repeats:
        return f"no trees across every {threshold.at} tokens: {threshold.why}"
    return f"no trees {'across' if threshold.beyond else 'beyond'} {threshold.at} tokens: {threshold.why}"
