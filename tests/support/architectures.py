"""Tiny random models of the most used architectures.

Each case is a family and a configuration with a few thousand parameters in float32. Windows, chunks and other length
limits are so small that a short text exceeds them. `architecture_page` measures the cases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from support.cases import thinned
from support.releases import skip_without
from support.tiny import sizes
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 96
WINDOW = 8
LEFT_OUT: Any = object()
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **sizes(
        "hidden_size=32 intermediate_size=48 num_hidden_layers=2 num_attention_heads=4 "
        "num_key_value_heads=2 head_dim=8 max_position_embeddings=256 initializer_range=0.25 "
        "bos_token_id=None eos_token_id=None pad_token_id=None"
    ),
}
MOE = sizes(
    "num_experts=4 num_local_experts=4 n_routed_experts=4 num_experts_per_tok=2 "
    "moe_intermediate_size=16 shared_expert_intermediate_size=16"
)
MLA = {
    "num_key_value_heads": 4,
    "head_dim": LEFT_OUT,
    **sizes("q_lora_rank=16 kv_lora_rank=16 qk_rope_head_dim=8 qk_nope_head_dim=8 v_head_dim=12"),
}
GROUP = {"n_group": 1, "topk_group": 1}
MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
SHARED = {
    **MIXED,
    "layer_types": MIXED["layer_types"] * 2,
    **sizes("num_hidden_layers=4 num_kv_shared_layers=2 hidden_size_per_layer_input=8"),
    "vocab_size_per_layer_input": VOCABULARY,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [3.0] * 4,
    "original_max_position_embeddings": 32,
    "factor": 4.0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


@dataclass(frozen=True)
class Case:
    """One configuration of one family."""

    family: str
    tested: str = ""
    """Distinguishing feature of this configuration."""
    config: dict[str, Any] = field(default_factory=dict)
    sdpa: bool = True
    """Whether the family supports sdpa attention in addition to eager."""

    def __str__(self) -> str:
        return f"{self.family} {self.tested}".strip()


def alike(families: str, tested: str = "", sdpa: bool = True, **config: Any) -> list[Case]:
    """Return a case for each family, all with the same configuration."""
    return [Case(family, tested, config, sdpa) for family in families.split()]


ONE_MASK = [
    *alike("llama ministral3 qwen2 qwen3 mixtral gemma phi phi3 phimoe gpt2 gpt_neox gpt_bigcode opt stablelm"),
    *alike("olmo olmo2 olmoe granite granitemoe cohere glm glm4 smollm3 starcoder2 nemotron seed_oss ernie4_5"),
    *alike("helium apertus arcee bitnet persimmon hunyuan_v1_dense nanochat diffllama doge biogpt"),
    *alike("qwen2_moe qwen3_moe glm4_moe minimax_m2", **MOE),
    Case("falcon", config={"head_dim": LEFT_OUT}),
    Case("gptj", config={"rotary_dim": 4}, sdpa=False),
    Case("codegen", config={"rotary_dim": 4}, sdpa=False),
    *alike("deepseek_v2 deepseek_v3 youtu", **{**MOE, **MLA, **GROUP}),
    Case("jetmoe", config={"num_local_experts": 4, "kv_channels": 8, "num_attention_heads": 4}),
    Case("xglm", config={"ffn_dim": 48}, sdpa=False),
    Case("mistral", "without window", {"sliding_window": None}),
]
WINDOWS = [
    Case("mistral", "window of 8", {"sliding_window": WINDOW}),
    Case("starcoder2", "window of 8", {"sliding_window": WINDOW}),
    Case("phi3", "window of 8", {"sliding_window": WINDOW}),
    Case("qwen2", "window of 8", {**MIXED, "use_sliding_window": True, "max_window_layers": 1}),
    Case("ministral", "window of 8", MIXED),
    Case("gemma2", "window of 8", MIXED, sdpa=False),
    Case("gemma3_text", "window of 8", MIXED),
    Case(
        "gemma3n_text",
        "window of 8, shared keys and values",
        {**SHARED, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4},
    ),
    Case("gemma4_text", "window of 8, shared keys and values", {**SHARED, "global_head_dim": 16}),
    Case("gpt_oss", "window of 8", {**MIXED, **MOE}, sdpa=False),
    Case("cohere2", "window of 8", MIXED),
    Case("olmo3", "window of 8", MIXED),
    Case("exaone4", "window of 8", {**MIXED, "sliding_window_pattern": 2}),
    Case("afmoe", "window of 8", {**MIXED, **MOE, "num_dense_layers": 1, "num_shared_experts": 1}),
    Case("mimo_v2_flash", "window of 8", {**MIXED, **MOE, "v_head_dim": 12}, sdpa=False),
    Case("vaultgemma", "window of 8", MIXED, sdpa=False),
    Case("smollm3", "window of 8", {**MIXED, "use_sliding_window": True, "no_rope_layers": [1, 0]}),
]
KEY_POSITIONS = [
    Case("bloom", config={"n_layer": 2, "n_head": 4}, sdpa=False),
    Case("mpt", config={"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "use_cache": True}, sdpa=False),
    Case("falcon", "ALiBi", {"alibi": True, "head_dim": LEFT_OUT}),
]
SLOTS = [
    Case(
        "gpt_neo",
        "local window of 32",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 32,
            "num_hidden_layers": LEFT_OUT,
            "num_attention_heads": LEFT_OUT,
        },
        sdpa=False,
    ),
]
BORDERS = [
    Case(
        "llama4_text",
        "chunks of 8, temperature step at 16",
        {
            **MOE,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "attention_chunk_size": WINDOW,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "no_rope_layers": [1, 1, 1, 0],
        },
    ),
    Case("phi3", "longrope, threshold at 32", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32}),
    Case(
        "phimoe",
        "longrope, threshold at 32",
        {"rope_parameters": {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.2}},
    ),
    Case("llama", "dynamic rotary scaling from 32", {"rope_parameters": DYNAMIC, "max_position_embeddings": 32}),
    Case(
        "deepseek_v32",
        "48 keys a query",
        {**MOE, **MLA, **GROUP, "index_topk": 48, "index_head_dim": 16, "index_n_heads": 2},
    ),
]
SUPPORTED = [*ONE_MASK, *WINDOWS, *KEY_POSITIONS, *SLOTS, *BORDERS]
EVERY_RUN = {
    *("llama", "gpt2", "gemma3_text window of 8", "bloom", "llama4_text chunks of 8, temperature step at 16"),
    *("gemma3n_text window of 8, shared keys and values", "phi3 longrope, threshold at 32"),
    *("deepseek_v32 48 keys a query", "qwen3_5_text", "bamba"),
}
"""One case for each kind of mask and state; `nox -s architectures` tests all others too."""


def chosen(cases: Iterable[Case]) -> list[Any]:
    """Return cases as test parameters: those of `EVERY_RUN` in every run, the others nightly."""
    return thinned(cases, kept=lambda one: str(one) in EVERY_RUN, ids=str)


def named(family: str, tested: str = "") -> Case:
    """Return the first supported case of a family whose description contains `tested`."""
    return next(case for case in SUPPORTED if case.family == family and tested in case.tested)


def model_of(case: Case, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    """Return the tiny random model of a case; `attention` is sdpa or eager."""
    torch.manual_seed(seed)
    chosen = {} if attention is None else {"attn_implementation": attention}
    skip_without(case.family, CONFIG_MAPPING)
    given = {name: value for name, value in {**BASE, **case.config}.items() if value is not LEFT_OUT}
    config = CONFIG_MAPPING[case.family](**given)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen).eval()
    made.generation_config.eos_token_id = made.generation_config.bos_token_id = None
    made.generation_config.pad_token_id = 0
    with torch.no_grad():
        for parameter in made.parameters():
            # Fresh biases and norms are constants, which would hide errors in their operands.
            if parameter.ndim == 1 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def attention_settings(model: PreTrainedModel) -> list[str]:
    """Return the attention implementation in a model's configuration, then those of its parts."""
    parts = [getattr(model.config, name) for name in model.config.sub_configs]
    return [config._attn_implementation for config in (model.config, *parts)]


@torch.no_grad()
def forget(model: PreTrainedModel) -> None:
    """Reset dynamic rotary scaling, which stores the longest sequence in the model, by reading a short one."""
    model(input_ids=torch.tensor([[1]]), use_cache=False)
