"""Requirements of each model family for exact trees.

Most models need one mask. Models with sliding windows or chunks need one per layer type (`Reach`). All other needs are
in `EXCEPTIONS`, by `config.model_type`: a new family is one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PretrainedConfig

_FAMILIES = """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 beam bert bert-generation big_bird biogpt bitnet bloom camembert
codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 deepseek_v32
diffllama doge dots1 dots3_note_text electra ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon flex_olmo
flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite
glm_moe_dsa gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe
granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3
iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text longcat_flash megatron-bert mellum mimo_v2_flash minicpm3
minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder mpt nanochat nemotron olmo olmo2
olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe rembert roberta
roberta-prelayernorm roc_bert roformer sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
xglm xlm-roberta xlm-roberta-xl xmod youtu
"""

_STATEFUL = """
bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid inkling2_text inkling_text jamba kimi_linear lara_mini lfm2
lfm2_moe lfm3 mamba mamba2 nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text zamba
zamba2 zaya
"""

WITH_STATES = frozenset(_STATEFUL.split())
"""Families that may have recurrent layers."""
READ_ON = WITH_STATES - {"falcon_mamba", "jamba", "mamba", "zamba"}
"""Families whose recurrent layers give the same states for several tokens at once as for single ones. In others, such a
pass starts as if nothing had been read; in unknown families it may. So after a state these read single tokens only.
"""
STATES_ELSEWHERE = frozenset({"recurrent_gemma", "rwkv", "xlstm"})
"""Families whose layers keep states in themselves, or in their own kind of cache."""
TESTED = frozenset(_FAMILIES.split()) | WITH_STATES
"""Families for which trees were compared with linear decoding: docs/architectures.md."""


@dataclass(frozen=True)
class Reach:
    """The part of the visible sequence that a layer sees, counted in positions."""

    kind: str = "full"
    """full: all of it; sliding: the last `size` tokens; chunked: the tokens of the same `size`-token chunk."""
    size: int = 0

    def of(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor | None:
        """Return pairs within reach, (batch, 1, queries, keys) bool, from positions (batch, ...); None for all."""
        queries, keys = query_positions[:, None, :, None], key_positions[:, None, None, :]
        if self.kind == "sliding":
            return keys > queries - self.size
        if self.kind == "chunked":
            return keys.div(self.size, rounding_mode="floor") == queries.div(self.size, rounding_mode="floor")
        return None


@dataclass(frozen=True)
class LengthThreshold:
    """A sequence length at which the model changes how it computes; a tree must not lie across it."""

    at: int
    """In tokens; a tree after `length` tokens is below the threshold if `length + nodes <= at`."""
    why: str
    beyond: bool = False
    """Whether trees are exact again beyond it."""
    repeats: bool = False
    """Whether there is another threshold after every `at` tokens."""
    at_once: bool = False
    """Whether a prompt that ends beyond it must be read in one pass, because its length determines how it is read."""
    changes_model: bool = False
    """Whether passes beyond it change the model itself, so that calls of several threads must take turns."""
    reread: bool = False
    """Whether the model's own `generate` reads the whole sequence again at this length."""

    def fits(self, length: int, nodes: int) -> bool:
        """Return whether a tree of `nodes` nodes after `length` tokens is exact."""
        if self.repeats:
            return (length + 1) // self.at == (length + nodes) // self.at
        return length + nodes <= self.at or (self.beyond and length >= self.at)


@dataclass(frozen=True)
class KeyBias:
    """A bias that grows with a key's cache slot (ALiBi); trees need it by position."""

    argument: str
    """The argument of the model's blocks that holds it."""
    in_mask: bool = False
    """Whether the model's attention mask contains it too."""
    shared: bool = False
    """Whether the model has one bias for all sequences of a batch."""


@dataclass(frozen=True)
class Needs:
    """Needs of a family besides masks; biases and thresholds follow from its configuration, None if it has none."""

    key_bias: Callable[[PretrainedConfig], KeyBias | None] = lambda config: None
    length_threshold: Callable[[PretrainedConfig], LengthThreshold | None] = lambda config: None
    slots: bool = False
    """Whether positions or attention windows are counted in cache slots, whatever positions the model is given."""
    sees_padding: bool = False
    """Whether `generate` lets tokens attend to padding."""


def _llama4_threshold(config: PretrainedConfig) -> LengthThreshold | None:
    if not config.attn_temperature_tuning or all(config.no_rope_layers):
        return None
    return LengthThreshold(
        config.floor_scale, "layers without rotary positions scale queries by cache slot", repeats=True
    )


def _minimax_m3_threshold(config: PretrainedConfig) -> LengthThreshold | None:
    if "minimax_m3_sparse" not in config.layer_types:
        return None
    # The block of a query is always chosen, so a tree within one block does not affect the choice. Without local blocks
    # it competes with the others.
    size = config.index_block_size if config.index_local_blocks else 1
    return LengthThreshold(size, "its index chooses blocks of cache slots", repeats=True)


def _phi3_threshold(config: PretrainedConfig) -> LengthThreshold | None:
    threshold = rotary_threshold(config)
    return threshold and replace(threshold, reread=hasattr(config, "original_max_position_embeddings"))


EXCEPTIONS: dict[str, Needs] = {
    "bloom": Needs(key_bias=lambda config: KeyBias("alibi")),
    "mpt": Needs(key_bias=lambda config: KeyBias("position_bias", shared=True)),
    "falcon": Needs(key_bias=lambda config: KeyBias("alibi", in_mask=True) if config.alibi else None),
    "llama4_text": Needs(length_threshold=_llama4_threshold),
    "minimax_m3_vl_text": Needs(length_threshold=_minimax_m3_threshold),
    "phi3": Needs(length_threshold=_phi3_threshold),
    "phimoe": Needs(length_threshold=_phi3_threshold),
    "git": Needs(sees_padding=True),  # its mask is shifted by image tokens, even without an image
    "gpt_neo": Needs(slots=True),
    "inkling_text": Needs(slots=True),
    "inkling2_text": Needs(slots=True),
}
"""Families for which masks and positions are not enough."""


def index_threshold(config: PretrainedConfig) -> LengthThreshold | None:
    """Return the length from which sparse attention chooses among keys by an index; None if the index reads only the
    tokens of each query's path, in order.
    """
    if hasattr(config, "indexer_compress_ratio"):
        return None
    # Scores of keys are cut off at 0, so many are equal, and the choice among these depends on the number of slots in a
    # pass: only a pass over exactly the slots of `generate` makes the same choice.
    why = "its index chooses among equal keys by their slots"
    return LengthThreshold(getattr(config, "index_topk", 0), why, at_once=True)


def changes_frequencies(rope_type: str) -> bool:
    """Return whether rotary frequencies change with the sequence length under this scaling."""
    return rope_type == "longrope" or "dynamic" in rope_type


def rotary_threshold(config: PretrainedConfig) -> LengthThreshold | None:
    """Return the length at which rotary frequencies change, or None if the scaling is constant."""
    given = getattr(config, "rope_parameters", None) or {}
    thresholds = []
    for parameters in [given, *(value for value in given.values() if isinstance(value, dict))]:
        kind = str(parameters.get("rope_type"))
        if not changes_frequencies(kind):
            continue
        if kind == "longrope":
            at = parameters.get("original_max_position_embeddings") or config.original_max_position_embeddings
            why = "longrope changes its frequencies there"
        else:
            at, why = config.max_position_embeddings, "dynamic rotary scaling changes with every token after it"
        thresholds.append(LengthThreshold(at, why, beyond=kind == "longrope", at_once=True, changes_model=True))
    return min(thresholds, key=lambda threshold: threshold.at, default=None)
