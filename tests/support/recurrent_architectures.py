"""Tiny random models of the families with recurrent layers, with or without attention."""

from __future__ import annotations

from typing import Any

from support.architectures import BASE, GROUP, LEFT_OUT, MLA, MOE, VOCABULARY, WINDOW, Case
from support.tiny import sizes

_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = sizes(
    "linear_conv_kernel_dim=4 linear_key_head_dim=8 linear_value_head_dim=8 "
    "linear_num_key_heads=2 linear_num_value_heads=4"
)
_CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
_MAMBA2: dict[str, Any] = sizes(
    "mamba_n_heads=4 mamba_d_head=16 mamba_d_state=8 mamba_n_groups=1 mamba_expand=2 mamba_chunk_size=16"
)
_ZAMBA = {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 8}
_HYBRIDS = ["hybrid_sliding", "hybrid", "hybrid"]
_WINDOW = {"sliding_window": WINDOW, "num_hidden_layers": 3}
_INKLING = {
    **_WINDOW,
    "layer_types": _HYBRIDS,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
}
_EXPERTS = {**MLA, **GROUP, **MOE}

_INSIDE: dict[str, Any] = {
    **dict.fromkeys(BASE, LEFT_OUT),
    "vision_config": sizes(
        "depth=1 hidden_size=16 intermediate_size=16 num_heads=2 out_hidden_size=32 "
        "num_position_embeddings=16 patch_size=4"
    ),
}
"""Configuration of the image model around a text decoder."""

_INDEXED = {
    **_HYBRID,
    **_DELTA,
    **MOE,
    **sizes(
        "hc_lowrank=4 indexer_n_heads=2 indexer_kv_heads=1 indexer_head_dim=8 indexer_budget=16 "
        "indexer_compress_ratio=2"
    ),
}

RECURRENT = [
    Case("qwen3_next", config={**_HYBRID, **_DELTA, **MOE}),
    Case("qwen3_5_text", config={**_HYBRID, **_DELTA}),
    Case("qwen3_5_moe_text", config={**_HYBRID, **_DELTA, **MOE}),
    Case("qwen3_5", config={**_INSIDE, "text_config": {**BASE, **_HYBRID, **_DELTA}}),
    Case("qwen3_5_moe", config={**_INSIDE, "text_config": {**BASE, **_HYBRID, **_DELTA, **MOE}}),
    Case(
        "lara_mini",
        "window of 8",
        {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": WINDOW, **_DELTA, **MOE},
    ),
    Case("olmo_hybrid", config={**_HYBRID, **_DELTA}),
    Case(
        "kimi_linear",
        config={**_HYBRID, **_EXPERTS, "q_lora_rank": LEFT_OUT, "linear_num_heads": 4, "linear_head_dim": 8},
    ),
    Case("bailing_hybrid", config={**_EXPERTS, "num_hidden_layers": 4, "layer_group_size": 2, "head_dim": 8}),
    Case("qwen4_exp_text", "16 keys a query", _INDEXED),
    Case("qwen4_exp", "16 keys a query", {**_INSIDE, "text_config": {**BASE, **_INDEXED}}),
    Case("lfm2", config=_CONVOLUTION),
    Case("lfm2_moe", config={**_CONVOLUTION, **MOE, "num_dense_layers": 1}),
    Case("lfm3", "window of 8", {"layer_types": ["conv", "sliding_attention", "full_attention"], **_WINDOW}),
    Case("falcon_h1", config={**_MAMBA2, "mamba_d_ssm": 64}),
    Case("granitemoehybrid", config={**_MAMBA2, **MOE, "layer_types": ["mamba", "attention"]}),
    Case("bamba", config={**_MAMBA2, "attn_layer_indices": [1]}),
    Case(
        "nemotron_h",
        config={
            **MOE,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "moe", "mlp"],
            **sizes(
                "mamba_num_heads=4 mamba_head_dim=16 ssm_state_size=8 n_groups=1 chunk_size=16 "
                "moe_shared_expert_intermediate_size=16"
            ),
        },
    ),
    Case("jamba", config={**MOE, "attn_layer_offset": 1, "attn_layer_period": 2, "mamba_d_state": 4}),
    Case("zamba", config={**_ZAMBA, "n_mamba_heads": 2, "attention_head_dim": 16}),
    Case(
        "zamba2",
        config={
            **_ZAMBA,
            **sizes(
                "n_mamba_heads=4 mamba_headdim=16 mamba_ngroups=1 num_mem_blocks=1 adapter_rank=4 "
                "chunk_size=16 use_mem_rope=True"
            ),
        },
    ),
    Case("zaya", config={**MOE, "router_hidden_size": 8, "num_experts_per_tok": 1}),
    Case(
        "zaya",
        "window of 8",
        {**MOE, **_WINDOW, "router_hidden_size": 8, "num_experts_per_tok": 1, "layer_types": _HYBRIDS},
    ),
    Case("inkling_text", "window of 8", {**MOE, **_INKLING, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 16}),
    Case("inkling2_text", "window of 8", {**MOE, **_INKLING, "unpadded_vocab_size": VOCABULARY}, sdpa=False),
    Case("mamba", config={"state_size": 4}, sdpa=False),
    Case("falcon_mamba", config={"state_size": 4}, sdpa=False),
    Case(
        "mamba2", config={"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 16}, sdpa=False
    ),
]


def recurrent(family: str) -> Case:
    """Return the first supported case of a recurrent family."""
    return next(case for case in RECURRENT if case.family == family)


RECURRENT_REFUSED = [
    Case(
        "qwen4_exp_text",
        "with n-gram embeddings",
        {
            **_INDEXED,
            **sizes(
                "heads_per_ngram=2 ple_embed_dim=8 ngram_vocab_size_base=50 make_ngram_vocab_size_divisible_by=4 "
                "split_ngram_parts=1 eos_token_id=1"
            ),
            "ple_layer_ids": [1],
        },
    ),
    Case("minimax", config={**_HYBRID, **MOE}),
    Case(
        "inkling2_loop_text",
        "with two passes of its loop",
        sdpa=False,
        config={
            **MOE,
            **_INKLING,
            "num_hidden_layers": 4,
            "layer_types": LEFT_OUT,
            "unpadded_vocab_size": VOCABULARY,
            **sizes(
                "swa_head_dim=8 sliding_window_size=8 d_rel=4 rel_extent=16 "
                "n_layers_per_attn_res_block=1 loop_layer_index_start=1 loop_layer_index_end=3 loop_num_passes=2 "
                "loop_gate_rank=4"
            ),
        },
    ),
    Case("recurrent_gemma", config={"num_hidden_layers": 3, "block_types": ["recurrent", "recurrent", "attention"]}),
    Case("rwkv"),
    Case("xlstm"),
]
