"""Small random models of mlx-lm's families, in float32."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from support import tiny
from support.tiny import sizes

TOKENIZER = tiny.tokenizer()
TOKENIZER.eos_token = None  # a random model would emit it occasionally
VOCABULARY = len(TOKENIZER)
WINDOW = 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **sizes(
        "hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 "
        "num_key_value_heads=2 head_dim=8 rms_norm_eps=1e-06 layer_norm_eps=1e-06 norm_eps=1e-06 "
        "rope_theta=10000.0 max_position_embeddings=1024 tie_word_embeddings=False"
    ),
}
_EXPERTS: dict[str, Any] = {
    **sizes("num_experts=4 num_local_experts=4 num_experts_per_tok=2 moe_intermediate_size=32 decoder_sparse_step=1"),
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}

KEYS_AND_VALUES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "deepseek_v3": sizes(
        "kv_lora_rank=16 q_lora_rank=16 qk_rope_head_dim=8 qk_nope_head_dim=8 v_head_dim=8 "
        "n_routed_experts=4 n_shared_experts=1 num_experts_per_tok=2 moe_intermediate_size=32 "
        "first_k_dense_replace=1"
    ),
}
"""Families with keys and values for all tokens, with their additional settings."""
ROTATING: dict[str, dict[str, Any]] = {
    "gemma3_text": _SLIDING,
    "cohere2": {**_SLIDING, "logit_scale": 1.0},
    "gpt_oss": {**_EXPERTS, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
}
"""Families with a window of 16 tokens."""
STATES: dict[str, dict[str, Any]] = {
    "lfm2": {
        **sizes(
            "conv_bias=False conv_L_cache=3 block_dim=32 block_multiple_of=8 "
            "block_ffn_dim_multiplier=1.0 block_auto_adjust_ff_dim=False"
        ),
        "layer_types": ["conv", "full_attention"],
    },
    "mamba": sizes("state_size=8 conv_kernel=4 use_bias=False use_conv_bias=True time_step_rank=4"),
    "qwen3_next": {
        **_EXPERTS,
        **sizes(
            "linear_num_value_heads=4 linear_num_key_heads=2 linear_key_head_dim=32 "
            "linear_value_head_dim=8 linear_conv_kernel_dim=4 shared_expert_intermediate_size=32 "
            "partial_rotary_factor=0.5 full_attention_interval=2"
        ),
    },
    "falcon_h1": sizes("mamba_d_conv=4 mamba_d_head=8 mamba_d_ssm=32 mamba_d_state=8 mamba_n_heads=4"),
    "recurrent_gemma": {
        **sizes("attention_bias=False conv1d_width=4 logits_soft_cap=30.0"),
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "attention"],
    },
}
"""Families with recurrent layers: one without attention, one with a window."""


_CONTEXT = {"cohere2": 0.5, "lfm2": 0.15, "gemma3_text": 0.01, "mamba": 0.01, "qwen3": 0.1, "deepseek_v3": 0.1}


def made(family: str, seed: int = 1, **config: Any) -> Any:
    """Return a random model of a family. The contribution of the layers to the newest token's embedding is scaled, as
    in `tiny.llama`: outputs repeat enough for drafts to be accepted, and vary enough for some to be rejected.
    """
    module = importlib.import_module(f"mlx_lm.models.{family}")
    of_family = {**KEYS_AND_VALUES, **ROTATING, **STATES}[family]
    model = module.Model(module.ModelArgs.from_dict({"model_type": family, **_SIZES, **of_family, **config}))
    mx.random.seed(seed)
    outputs = ("o_proj.weight", "down_proj.weight", "out_proj.weight", "w2.weight")
    weights = []
    for name, weight in tree_flatten(model.parameters()):
        if weight.ndim > 1 and mx.issubdtype(weight.dtype, mx.floating):
            scale = 0.3 * (_CONTEXT.get(family, 0.03) if name.endswith(outputs) else 1)
            weights.append((name, scale * mx.random.normal(weight.shape)))
    model.load_weights(weights, strict=False)
    model.eval()
    mx.eval(model.parameters())
    return model
