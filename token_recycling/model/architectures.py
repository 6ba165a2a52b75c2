"""Which models can verify a tree, and what each needs for it. The one table of exceptions is here.

A tree is right for a model whose attention follows the mask and the positions it is given. Most models need one mask;
models whose layers see windows or chunks of the text need one for each type of layer. What remains is in `EXCEPTIONS`,
by the family's name (`config.model_type`): a new one is one entry. Whatever keeps a recurrent state is refused: a state
cannot go back to before a rejected token.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DummyLayer, DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from .inspection import held_by

MASKED_ATTENTION = ("sdpa", "eager")
"""Attention implementations that take a mask of any shape."""

_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer, DummyLayer)

_FAMILIES = """
afmoe apertus arcee biogpt bitnet bloom codegen cohere cohere2 deepseek_v2 deepseek_v3 deepseek_v32 diffllama doge
ernie4_5 exaone4 falcon gemma gemma2 gemma3_text gemma3n_text gemma4_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo
gpt_neox gpt_oss gptj granite granitemoe helium hunyuan_v1_dense jetmoe llama llama4_text mimo_v2_flash minimax_m2
ministral ministral3 mistral mixtral mpt nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 vaultgemma xglm youtu
"""

TESTED = frozenset(_FAMILIES.split())
"""Families for which trees were compared with linear decoding: docs/architectures.md."""


class UnsupportedModelError(ValueError):
    """The model, or the way it was called, cannot be accelerated without risking its output."""


@dataclass(frozen=True)
class Reach:
    """How much of the visible text a layer sees, counted in positions."""

    kind: str = "full"
    """full: all of it; sliding: the last `size` tokens; chunked: the tokens of the same `size`-token chunk."""
    size: int = 0

    def of(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor | None:
        """Pairs within reach, (batch, 1, queries, keys) bool, from positions (batch, ...); None for all pairs."""
        queries, keys = query_positions[:, None, :, None], key_positions[:, None, None, :]
        if self.kind == "sliding":
            return keys > queries - self.size
        if self.kind == "chunked":
            return keys.div(self.size, rounding_mode="floor") == queries.div(self.size, rounding_mode="floor")
        return None


@dataclass(frozen=True)
class Border:
    """A length of text at which the model changes how it computes; a tree must not lie across it."""

    at: int
    """In tokens; a tree after `length` tokens is before the border if `length + nodes <= at`."""
    why: str
    beyond: bool = False
    """Whether trees are exact again beyond it."""
    repeats: bool = False
    """Whether there is another border after every `at` tokens."""
    at_once: bool = False
    """Whether a prompt that ends beyond it must be read in one pass, because its length decides how it is read."""
    reread: bool = False
    """Whether the model's own `generate` reads the whole text again on reaching it."""

    def fits(self, length: int, nodes: int) -> bool:
        """Whether a tree of `nodes` nodes after `length` tokens is exact."""
        if self.repeats:
            return (length + 1) // self.at == (length + nodes) // self.at
        return length + nodes <= self.at or (self.beyond and length >= self.at)


@dataclass(frozen=True)
class KeyBias:
    """A bias that grows with a key's place in the cache (ALiBi), and that trees need by position."""

    argument: str
    """The argument of the model's blocks that holds it."""
    in_mask: bool = False
    """Whether the model puts it into the attention mask too."""
    shared: bool = False
    """Whether the model has one bias for all texts of a batch."""


@dataclass(frozen=True)
class Exceptional:
    """What a family needs besides masks; both are made from its configuration, None if nothing."""

    key_bias: Callable[[PretrainedConfig], KeyBias | None] = lambda config: None
    border: Callable[[PretrainedConfig], Border | None] = lambda config: None


def _llama4_border(config: PretrainedConfig) -> Border | None:
    if not config.attn_temperature_tuning or all(config.no_rope_layers):
        return None
    return Border(config.floor_scale, "layers without rotary positions scale queries by cache slot", repeats=True)


def _phi3_border(config: PretrainedConfig) -> Border | None:
    border = rotary_border(config)
    return border and replace(border, reread=hasattr(config, "original_max_position_embeddings"))


EXCEPTIONS: dict[str, Exceptional] = {
    "bloom": Exceptional(key_bias=lambda config: KeyBias("alibi")),
    "mpt": Exceptional(key_bias=lambda config: KeyBias("position_bias", shared=True)),
    "falcon": Exceptional(key_bias=lambda config: KeyBias("alibi", in_mask=True) if config.alibi else None),
    "llama4_text": Exceptional(border=_llama4_border),
    "phi3": Exceptional(border=_phi3_border),
    "phimoe": Exceptional(border=_phi3_border),
    "gpt_neo": Exceptional(
        border=lambda config: Border(config.window_size, "local attention counts cache slots, not positions")
    ),
}
"""Families that masks and positions alone do not make exact."""


def rotary_border(config: PretrainedConfig) -> Border | None:
    """Where rotary frequencies change with the length of the text, for the scalings that do so."""
    given = getattr(config, "rope_parameters", None) or {}
    borders = []
    for parameters in [given, *(value for value in given.values() if isinstance(value, dict))]:
        kind = parameters.get("rope_type")
        if kind == "longrope":
            at = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            borders.append(Border(at, "longrope changes its frequencies there", beyond=True, at_once=True))
        elif "dynamic" in str(kind):
            at = config.max_position_embeddings
            borders.append(Border(at, "dynamic rotary scaling changes with every token after it", at_once=True))
    return min(borders, key=lambda border: border.at, default=None)


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
    attention: str = "sdpa"
    """The attention implementation of accelerated calls."""
    named_attention: bool = True
    """Whether the model looks attention up by name, so that another function may stand in for it."""
    notes: tuple[str, ...] = ()
    """What else a user should know."""
    difference: float | None = None
    """Of a self-test: the largest difference between logits of a tree and of linear decoding."""
    no_fast_path: str | None = None
    """Why its steps cannot be of constant shapes (docs/fast-path.md), as far as was looked; None if they can, wherever
    there is CUDA.
    """
    layers: Mapping[str, Reach] = field(default_factory=dict, repr=False)
    """Reach by type of layer."""
    border: Border | None = None
    key_bias: KeyBias | None = None

    @property
    def supported(self) -> bool:
        return self.reason is None

    @property
    def batch_reason(self) -> str | None:
        """Why several texts, or a padded one, cannot be decoded at once where one can; None if they can."""
        if self.border is not None:
            return f"expected one text without padding for {self.model}: {self.border.why}"
        if self.key_bias is not None and self.key_bias.shared:
            return f"expected one text without padding for {self.model}, whose ALiBi is one for all texts"
        return None

    def fits(self, length: int, nodes: int) -> bool:
        """Whether a tree of `nodes` nodes is exact after `length` tokens."""
        return nodes == 1 or self.border is None or self.border.fits(length, nodes)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "model": self.model,
            "family": self.family,
            "supported": self.supported,
            "how": self.how,
            "reason": self.reason,
            "tested": self.tested,
            "attention": self.attention,
            "border": None if self.border is None else self.border.at,
            "notes": list(self.notes),
            "difference": self.difference,
            "no_fast_path": self.no_fast_path,
        }


def support(model: PreTrainedModel) -> Support:
    """What is known about a model from its class and configuration alone; nothing runs."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel) or not model.can_generate():
        wanted = "expected a transformers model that generates text"
        return Support(name, "", f"{wanted}, got {name}; {held_by(model)}")
    config = model.config.get_text_config(decoder=True)
    family = config.model_type
    if model.config.is_encoder_decoder:
        return Support(name, family, f"expected a decoder-only model, got the encoder-decoder {name}")
    kept = DynamicCache(config=config).layers
    exceptional = EXCEPTIONS.get(family, Exceptional())
    key_bias, border = exceptional.key_bias(config), exceptional.border(config) or rotary_border(config)
    reason = _refusal(model, config, kept, key_bias)
    if reason is not None:
        return Support(name, family, reason)
    layers = _reaches(config)
    attention, notes = config._attn_implementation, []
    if attention not in MASKED_ATTENTION:
        notes.append(f"{attention} takes no tree mask: accelerated calls use {_masked(model)}")
        attention = _masked(model)
    if border is not None:
        notes.append(_where(border))
    indexed = any(type(layer) is DynamicIndexedLayer for layer in kept)
    return Support(
        name,
        family,
        how=_how(layers, key_bias),
        # A text decoder inside another model is called through that model, which is another matter.
        tested=family in TESTED and model.config is config,
        attention=attention,
        named_attention=bool(model._supports_attention_backend) and not indexed,
        notes=tuple(notes),
        layers=layers,
        border=border,
        key_bias=key_bias,
    )


def accepts(model: PreTrainedModel, argument: str) -> bool:
    """Whether the model's forward names this argument."""
    return argument in inspect.signature(model.forward).parameters


def _refusal(model: PreTrainedModel, config: PretrainedConfig, kept: list[Any], key_bias: KeyBias | None) -> str | None:
    """`kept`: the layers of the cache that the model would use."""
    name = type(model).__name__
    kinds = {type(layer) for layer in kept}
    if getattr(model, "_is_stateful", False) or any("LinearAttention" in kind.__name__ for kind in kinds):
        return (
            f"expected a model whose cache can forget tokens, got {name}: its state over the text (recurrent, "
            "convolutional or compressed) cannot go back to before a rejected token"
        )
    others = sorted(kind.__name__ for kind in kinds if kind not in _LAYERS)
    if others:
        return f"expected attention layers that keep one slot a token, got {name} with {', '.join(others)}"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) == "all":
        return f"expected causal attention, got {name}, whose tokens see those after them"
    if getattr(config, "alibi", False) and key_bias is None:
        return f"expected rotary or learned positions, got {name} with ALiBi of a kind that is not known"
    if key_bias is None and not accepts(model, "position_ids"):
        return f"expected a model that takes position_ids, got {name}, which derives positions itself"
    if any(re.search(r"FlashAttention\d", type(module).__name__) for module in model.modules()):
        return f"expected sdpa or eager attention, got {name} built for flash; load it with attn_implementation='sdpa'"
    windows = sorted({layer.sliding_window for layer in kept if type(layer) is DynamicSlidingWindowLayer})
    if len(windows) > 1:
        return f"expected one size of window for all layers, got {name} with {', '.join(map(str, windows))}"
    return None


def _reaches(config: PretrainedConfig) -> dict[str, Reach]:
    """The reach of each type of layer, by the name that the model's forward knows it by."""
    found = {}
    types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    for kind in dict.fromkeys(types):
        if kind == "sliding_attention" or (kind is None and getattr(config, "sliding_window", None)):
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


def _masked(model: PreTrainedModel) -> str:
    return "sdpa" if model._supports_sdpa else "eager"
