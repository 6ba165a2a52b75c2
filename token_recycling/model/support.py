"""Whether and how a model verifies trees, from its class and configuration alone; nothing runs.

A tree is right for a model whose attention follows the mask and the positions it is given, and whose layers with a
state over the text, if it has any, keep it in the cache (`recurrence`). What some families need besides is in
`architectures`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from .architectures import EXCEPTIONS, TESTED, Border, Exceptional, KeyBias, Reach, index_border, rotary_border
from .compat import DynamicIndexedLayer, LinearAttentionCacheLayerMixin, is_as_compared
from .inspection import accepts, held_by, parts_of
from .refusal import MASKED_ATTENTION, quantisation, refusal

_HYBRID = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""Types of layers that attend and keep a state as well, and how they attend."""


class UnsupportedModelError(ValueError):
    """The model, or the way it was called, cannot be accelerated without risking its output."""


@dataclass(frozen=True)
class Support:
    """How a model verifies trees, or why it cannot."""

    model: str
    """Name of its class."""
    family: str
    """`model_type` of the configuration of its text decoder."""
    reason: str | None = None
    """Why it is refused; None if it is supported."""
    how: str = "not at all"
    """Description of what trees need with it."""
    tested: bool = False
    """Whether the family was compared with linear decoding when this library was made."""
    quantised: bool = False
    """Whether its weights are not the plain numbers that the family was compared with."""
    attention: str = "sdpa"
    """The attention implementation of accelerated calls."""
    named_attention: bool = True
    """Whether the model looks attention up by name, so that another function may stand in for it."""
    notes: tuple[str, ...] = ()
    """Further notes for the user."""
    difference: float | None = None
    """Largest difference between logits of a tree and of linear decoding in a self-test."""
    no_fast_path: str | None = None
    """Why its steps cannot be of constant shapes (docs/fast-path.md), as far as was looked; None if they can, wherever
    there is CUDA.
    """
    layers: Mapping[str, Reach] = field(default_factory=dict, repr=False)
    """Reach by type of layer."""
    border: Border | None = None
    key_bias: KeyBias | None = None
    branches: bool = True
    """Whether a tree may branch; if not, its nodes must lie in the cache as a text does."""
    recurrent: bool = False
    """Whether some of its layers keep a state over the text."""
    reads_on: bool = True
    """Whether it reads several tokens behind a cache as it reads them one by one."""

    @property
    def supported(self) -> bool:
        return self.reason is None

    @property
    def batch_reason(self) -> str | None:
        """Why several texts, or a padded one, cannot be decoded at once where one can; None if they can."""
        if self.border is not None:
            return f"expected one text without padding for {self.model}: {self.border.why}"
        if not self.branches:
            return f"expected one text without padding for {self.model}, whose positions are slots of its cache"
        if self.key_bias is not None and self.key_bias.shared:
            return f"expected one text without padding for {self.model}, whose ALiBi is one for all texts"
        return None

    def cannot_read_on(self, held: int, length: int) -> str | None:
        """Why a text of `length` tokens cannot be read on behind the first `held` of them, or None if it can."""
        if self.reads_on or not held or length - held == 1:
            return None
        return (
            f"expected a cache that lacks the text's last token alone, got one of {held} tokens for {length}: "
            f"{self.model} reads several tokens behind a cache in another way than one by one; pass the whole text "
            "without a cache"
        )

    def fits(self, length: int, nodes: int) -> bool:
        """Whether a tree of `nodes` nodes is exact after `length` tokens."""
        return nodes == 1 or self.border is None or self.border.fits(length, nodes)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        plain = ("model", "family", "supported", "how", "reason", "tested", "attention", "difference", "no_fast_path")
        border = None if self.border is None else self.border.at
        return {**{name: getattr(self, name) for name in plain}, "border": border, "notes": list(self.notes)}


def support(model: PreTrainedModel) -> Support:
    """Return what is known about a model from its class and configuration alone; nothing runs.

    It is kept while the model has the same kinds of parts and an equal configuration. What is quantised is looked at
    with every call: its weights may change their ways and keep their kind.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        wanted = "expected a transformers model that generates text"
        return Support(name, "", f"{wanted}, got {name}; {held_by(model)}")
    built = _kinds(model), _stated(model.config)
    if model in _kept and _kept[model][0] == built:
        return _kept[model][1]
    found = _found(model)
    if not found.quantised:
        _kept[model] = copy.deepcopy(built), found
    return found


_kept: WeakKeyDictionary[PreTrainedModel, tuple[Any, Support]] = WeakKeyDictionary()
"""Of models the parts and the configuration that were looked at, and what was found."""


def _kinds(model: PreTrainedModel) -> list[Any]:
    kinds: list[Any] = [getattr(model, "is_quantized", False)]
    for part in parts_of(model):
        kinds += (type(part), part._compiled_call_impl is None, "forward" in part.__dict__)
        kinds += map(type, part._parameters.values())
    return kinds


def _stated(config: PretrainedConfig) -> dict[str, Any]:
    """All that a configuration says, and those within it, whose own comparison fails where layers differ in size."""
    return {
        name: _stated(value) if isinstance(value, PretrainedConfig) else value for name, value in vars(config).items()
    }


def _found(model: PreTrainedModel) -> Support:
    name = type(model).__name__
    config = model.config.get_text_config(decoder=True)
    family = config.model_type
    if model.config.is_encoder_decoder:
        return Support(name, family, f"expected a decoder-only model, got the encoder-decoder {name}")
    if not hasattr(config, "num_hidden_layers"):
        several = "which has several for bytes and patches"
        return Support(name, family, f"expected one stack of layers, got {name}, {several}")
    kept = DynamicCache(config=config).layers
    exceptional = EXCEPTIONS.get(family, Exceptional())
    indexed = any(type(layer) is DynamicIndexedLayer for layer in kept)
    key_bias = exceptional.key_bias(config)
    border = index_border(config) if indexed else exceptional.border(config) or rotary_border(config)
    recurrent = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in kept)
    reason = refusal(model, config, kept, key_bias)
    quantised, sharing = quantisation(model)
    if reason is None and sharing is not None:
        reason = f"{depends_on_rows(name)}: activations of a pass share one scale in {sharing}; quantise weights alone"
    if reason is not None:
        return Support(name, family, reason)
    layers = _reaches(config)
    attention, notes = config._attn_implementation, []
    if attention not in MASKED_ATTENTION:
        used = "sdpa" if model._supports_sdpa else "eager"
        notes.append(f"{attention} takes no tree mask: accelerated calls use {used}")
        attention = used
    if border is not None:
        notes.append(_where(border))
    attends = any(isinstance(layer, CacheLayerMixin) for layer in kept)
    how = _how(layers, key_bias) if attends else ""
    branches = not exceptional.slots and (not attends or key_bias is not None or accepts(model, "position_ids"))
    if not branches:
        notes.append("its positions are slots of its cache: of a tree, the first path is drafted")
    return Support(
        name,
        family,
        how=", ".join(filter(None, [how, "states by node" * recurrent, "paths alone" * (not branches)])),
        # A text decoder inside another model is called through that model, which is another matter.
        tested=family in TESTED and is_as_compared(family) and model.config is config,
        quantised=quantised,
        attention=attention,
        named_attention=bool(model._supports_attention_backend) and not indexed,
        notes=tuple(notes),
        layers=layers,
        border=border,
        key_bias=key_bias,
        branches=branches,
        recurrent=recurrent,
        reads_on=not recurrent or exceptional.reads_on,
    )


def depends_on_rows(name: str) -> str:
    """Begin the reason for refusing a model whose logits depend on more than the text before them."""
    return f"expected logits that do not depend on how many tokens are read at once, got {name}, where they do"


def _reaches(config: PretrainedConfig) -> dict[str, Reach]:
    """The reach of each type of layer, by the name that the model's forward knows it by."""
    found: dict[str, Reach] = {}
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    for kind in dict.fromkeys(types):
        if kind in _HYBRID:  # such a layer's attention goes by either name
            reach = Reach("sliding", config.sliding_window) if kind == "hybrid_sliding" else Reach()
            found |= {kind: reach, _HYBRID[kind]: reach, "linear_attention": Reach()}
        elif kind == "sliding_attention" or (kind is None and getattr(config, "sliding_window", None)):
            found[kind or "sliding_attention"] = Reach("sliding", config.sliding_window)
        elif kind == "chunked_attention" or (kind is None and getattr(config, "attention_chunk_size", None)):
            found[kind or "chunked_attention"] = Reach("chunked", config.attention_chunk_size)
        else:
            found[kind or "full_attention"] = Reach()
    return found


def _how(layers: Mapping[str, Reach], key_bias: KeyBias | None) -> str:
    if key_bias is not None:
        return "one mask, ALiBi by position"
    (first, *others) = set(layers.values())
    if others:
        return "a mask per layer type"
    return "one mask" if first == Reach() else f"one mask, {first.kind} by {first.size}"


def _where(border: Border) -> str:
    if border.repeats:
        return f"no trees across every {border.at} tokens: {border.why}"
    return f"no trees {'across' if border.beyond else 'beyond'} {border.at} tokens: {border.why}"
