"""Tiny random models of the families of `AutoModelForCausalLM` that are not in `architectures`.

That module has the most used families in several configurations; this one has one case for each other family.
Together with `UNMEASURED` they cover transformers 5.24.
"""

from __future__ import annotations

from typing import Any

from support.architectures import BASE, BORDERS, GROUP, LEFT_OUT, MIXED, MLA, MOE, VOCABULARY, WINDOW, Case, alike
from support.tiny import sizes

TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
"""For configurations that require them."""
TOWER = sizes(
    "hidden_size=16 intermediate_size=16 num_hidden_layers=1 num_attention_heads=2 image_size=28 patch_size=14"
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXED = {**MOE, **MLA, **GROUP, "index_topk": 48, "index_head_dim": 16, "index_n_heads": 2}
KEYS_48 = "48 keys a query"


def _inside(family: str, tested: str = "", text: dict[str, Any] | None = None, **others: Any) -> Case:
    """Return the case of a text decoder inside a model for images or audio, tested on text only."""
    decoder = {name: value for name, value in {**BASE, **(text or {})}.items() if value is not LEFT_OUT}
    outside = dict.fromkeys(BASE, LEFT_OUT)
    return Case(family, tested, {**outside, "text_config": decoder, **others}, sdpa=family != "got_ocr2")


FULL = [
    *alike("exaone gpt-sw3 hyperclovax internlm3 iquestcoder jais2"),
    Case("apertus1p5_text", config={"rope_parameters": ROPE}),
    Case("sarvam_mla", config={**MOE, **MLA, **GROUP}),
    Case("sarvam_moe", config={**MOE, **GROUP, "n_shared_experts": 1}),
    *alike("gpt_neox_japanese", sdpa=False),
    *alike("dots1 solar_open", **MOE, **GROUP, n_shared_experts=1),
    *alike("axk1 glm4_moe_lite", **{**MOE, **MLA, **GROUP}),
    *alike("flex_olmo hunyuan_v1_moe hy_v3 ernie4_5_moe", **MOE),
    Case("aria_text", config={"moe_num_experts": 4}),
    Case("ctrl", config={"dff": 48}),
    Case("granitemoeshared", config={"num_local_experts": 4, "shared_intermediate_size": 16}),
    Case("hrm_text", config={"initializer_range": 0.15}),
    Case("minicpm3", config=MLA),
    Case(
        "dbrx",
        config={
            "d_model": 32,
            "hidden_size": LEFT_OUT,
            "num_key_value_heads": LEFT_OUT,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    Case(
        "longcat_flash",
        config={
            **MLA,
            "head_dim": 8,
            "num_layers": 2,
            "num_hidden_layers": LEFT_OUT,
            **sizes("n_routed_experts=4 moe_topk=2 zero_expert_num=2 ffn_hidden_size=48"),
            "intermediate_size": LEFT_OUT,
            "expert_ffn_hidden_size": 16,
        },
    ),
    Case(
        "phi4_multimodal",
        config={
            "vision_config": {**TOWER, "crop_size": 28},
            "audio_config": sizes(
                "hidden_size=16 intermediate_size=16 num_blocks=1 num_attention_heads=2 "
                "nemo_conv_channels=16 ext_pw_out_channel=16 depthwise_seperable_out_channel=16"
            ),
        },
    ),
    Case("git", config={"vision_config": TOWER, "pad_token_id": 0}, sdpa=False),
    _inside("fuyu", text={"model_type": "persimmon"}),
    _inside(
        "got_ocr2",
        text={"model_type": "qwen2"},
        vision_config={**TOWER, "output_channels": 8, "image_size": 64, "patch_size": 16, "mlp_dim": 16},
    ),
    _inside(
        "emu3",
        text=TOKENS,
        vq_config={
            **sizes("codebook_size=16 embed_dim=8 latent_channels=8 base_channels=32"),
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
        },
    ),
    _inside(
        "moss_transcribe_diarize",
        text={"model_type": "qwen3"},
        audio_config={"model_type": "whisper", "d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16},
    ),
    _inside(
        "mllama",
        text={**TOKENS, "cross_attention_layers": []},
        vision_config={
            **TOWER,
            **sizes("num_global_layers=1 attention_heads=2 vision_output_dim=16"),
            "intermediate_layers_indices": [0],
        },
    ),
]
BERT = {"is_decoder": True, "num_key_value_heads": LEFT_OUT, "head_dim": LEFT_OUT, "pad_token_id": 0}
BERTS = [
    *alike("bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm", **BERT),
    *alike("roc_bert xlm-roberta xlm-roberta-xl", **BERT),
    *alike("big_bird megatron-bert rembert roformer", sdpa=False, **BERT),
    Case("xmod", config={**BERT, "languages": ["en_XX"], "default_language": "en_XX"}),
]
ROPES = dict.fromkeys(MIXED["layer_types"], ROPE)
FURTHER_WINDOWS = [
    *alike("beam exaone_moe kolibri1 laguna mellum", "window of 8", **MIXED, **MOE, **GROUP),
    *alike("cwm modernbert-decoder", "window of 8", **{**MIXED, **TOKENS}),
    *alike("granite_swa", "window of 8", sdpa=False, **MIXED),
    *alike("flint granitemoe_swa", "window of 8", sdpa=False, **MIXED, **MOE),
    Case("cohere2_moe", "window of 8", {**MIXED, **MOE}),
    Case("cohere_compass_text", "window of 8", {**MIXED, "rope_parameters": ROPES}),
    Case("gemma4_unified_text", "window of 8", {**MIXED, "global_head_dim": 16}),
    _inside("gemma4_unified", "window of 8", {**MIXED, "global_head_dim": 16, "pad_token_id": 0}),
    _inside("gemma3", "window of 8", MIXED, vision_config=TOWER),
    _inside(
        "gemma4",
        "window of 8",
        {
            **MIXED,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 16,
            "pad_token_id": 0,
        },
    ),
]
SLIDING_HEADS = sizes(
    "num_attention_heads=4 num_key_value_heads=4 q_lora_rank=16 kv_lora_rank=16 head_dim=16 "
    "qk_nope_head_dim=8 v_head_dim=12"
)
DOTS3 = {
    **INDEXED,
    "shared_experts_intermediate_size": 16,
    "layer_types": ["indexed_attention", "sliding_attention"],
    "sliding_window": WINDOW,
    **{f"swa_{name}": size for name, size in SLIDING_HEADS.items()},
}
BLOCKS = Case(
    "minimax_m3_vl_text",
    "2 blocks of 16 keys a query",
    {
        **MOE,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        **sizes(
            "dense_intermediate_size=48 shared_intermediate_size=16 rotary_dim=8 index_head_dim=8 "
            "index_n_heads=2 index_block_size=16 index_topk_blocks=2"
        ),
    },
)
FURTHER_BORDERS = [
    *alike("axk2", KEYS_48, **INDEXED),
    *alike("glm_moe_dsa", KEYS_48, **INDEXED),
    *alike("hy_v4", KEYS_48, sdpa=False, **INDEXED, hc_mult=2),
    Case("dots3_note_text", f"{KEYS_48}, window of 8", DOTS3),
    _inside(
        "dots3_note",
        f"{KEYS_48}, window of 8",
        DOTS3,
        vision_config={**TOWER, "mlp_layer_types": ["dense"], "adapter_in_dim": 16, "adapter_out_dim": 32},
        audio_config=sizes(
            "hidden_size=16 intermediate_size=16 num_hidden_layers=1 num_attention_heads=2 "
            "downsample_hidden_size=8 feature_size=16 adapter_input_size=16 adapter_out_dim=32"
        ),
    ),
    BLOCKS,
    _inside(
        "llama4",
        "chunks of 8, temperature step at 16",
        next(case.config for case in BORDERS if case.family == "llama4_text"),
        vision_config={**TOWER, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
]
FURTHER = [*FULL, *BERTS, *FURTHER_WINDOWS, *FURTHER_BORDERS]

BYTES = {**TOWER, "hidden_size_global": 16}
FURTHER_REFUSED = [
    Case(
        "blt",
        config={
            **dict.fromkeys(set(BASE) - set(TOKENS), LEFT_OUT),
            "encoder_hash_byte_group_vocab": 32,
            "encoder_hash_byte_group_size": [3],
            "patcher_config": TOWER,
            "encoder_config": BYTES,
            "decoder_config": BYTES,
            "global_config": TOWER,
        },
    ),
    Case("cpmant", config={"dim_head": 8, "dim_ff": 48}),
    Case("deepseek_v4", config={**MOE, "index_n_heads": 2, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 16}),
    Case("moshi", "with a window shorter than its context", {"sliding_window": WINDOW, "ffn_dim": 48}),
    Case("openai-gpt"),
    Case("reformer", config={"is_decoder": True, "axial_pos_embds": False}),
    Case("xlm"),
    Case("xlnet", config={"d_inner": 48, "d_head": 8, "max_position_embeddings": LEFT_OUT}),
]

UNMEASURED = {
    "built by transformers only with the package timm": "gemma3n",
    "exact or refused by its self-test, as its configuration says how loops share a cache": "dory",
}
"""Families without a case, by reason."""
NOT_DECODER_ONLY = {
    "the decoders of encoder-decoders": """bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen
    musicgen_melody mvp pegasus plbart prophetnet trocr whisper""",
    "drafters that read the keys of their target": "gemma4_assistant gemma4_unified_assistant",
}
"""Families of `AutoModelForCausalLM` that are not independent language models, by kind."""

ENCODERS = """bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta
roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"""
"""Encoders, which decode only with `is_decoder=True`: measured, but not counted as causal language models."""
