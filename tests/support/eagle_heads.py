"""EAGLE heads for tests: files with random weights in each of the formats, and a reference computation, written from
the papers and the original programs without modules of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from token_recycling.drafters.eagle.formats import save_head
from token_recycling.training.continuations import Continuations
from token_recycling.training.declaration import EagleTraining
from token_recycling.training.eagle import new_head

HEADS, KV_HEADS, DIM, WIDTH, WITHIN, VOCABULARY, DRAFT = 4, 2, 8, 32, 48, 64, 24
"""Sizes, as in `tiny.llama`; `DRAFT` is the size of the draft vocabulary of heads that have one."""
EPS = 1e-5
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": WITHIN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPS,
    "vocab_size": VOCABULARY,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
}
EAGLE_1 = {"architectures": ["LlamaForCausalLM"], **LAYER}
EAGLE_3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT, **LAYER}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "speculators_version": "0.3.0",
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "somewhere"}},
    "draft_vocab_size": DRAFT,
    "norm_before_residual": False,
    "transformer_layer_config": LAYER,
}
IDS = torch.arange(DRAFT) * 2 + 3
"""Target ids of the draft vocabulary."""

Tensors = dict[str, torch.Tensor]


def tensors_of(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Return random weights with the names and shapes of a configuration."""
    draws = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws) * 0.3

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=draws)

    layer = config.get("transformer_layer_config", config)

    def decoder_layer(prefix: str, inputs: int) -> Tensors:
        own = layer.get("num_key_value_heads", HEADS) * DIM
        sizes = {"q": (HEADS * DIM, inputs), "k": (own, inputs), "v": (own, inputs)}
        made = {f"{prefix}self_attn.{name}_proj.weight": matrix(*size) for name, size in sizes.items()}
        made[f"{prefix}self_attn.o_proj.weight"] = matrix(WIDTH, HEADS * DIM)
        made |= {f"{prefix}mlp.{name}_proj.weight": matrix(WITHIN, WIDTH) for name in ("gate", "up")}
        made[f"{prefix}mlp.down_proj.weight"] = matrix(WIDTH, WITHIN)
        made[f"{prefix}post_attention_layernorm.weight"] = norm(WIDTH)
        if layer.get("attention_bias"):
            sizes["o"] = (WIDTH, HEADS * DIM)
        if config.get("qkv_bias") or layer.get("attention_bias"):
            made |= {f"{prefix}self_attn.{name}_proj.bias": matrix(size[0]) for name, size in sizes.items()}
        if layer.get("model_type") == "qwen3":
            made |= {f"{prefix}self_attn.{name}_norm.weight": norm(DIM) for name in ("q", "k")}
        return made

    if "draft_vocab_size" not in config and "speculators_model_type" not in config:
        made = {"fc.weight": matrix(WIDTH, 2 * WIDTH), **decoder_layer("layers.0.", WIDTH)}
        return made | ({"fc.bias": matrix(WIDTH)} if config.get("bias", True) else {})
    states = len(config.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0))
    target, draft = config.get("target_hidden_size") or WIDTH, config.get("draft_vocab_size") or VOCABULARY
    first = first_layer(config)
    made = {"fc.weight": matrix(WIDTH, states * target), **decoder_layer(first, 2 * WIDTH)}
    if config.get("bias"):
        made["fc.bias"] = matrix(WIDTH)
    made |= {f"{first}{name}.weight": norm(WIDTH) for name in ("hidden_norm", "input_layernorm")}
    for number in range(1, layer["num_hidden_layers"]):
        made |= {**decoder_layer(f"layers.{number}.", WIDTH), f"layers.{number}.input_layernorm.weight": norm(WIDTH)}
    made |= {"norm.weight": norm(WIDTH), "lm_head.weight": matrix(draft, WIDTH)}
    if config.get("eagle_config", {}).get("use_last_layernorm") is False:
        del made["norm.weight"]
    if config.get("norm_before_fc"):
        made["input_norm.weight"] = norm(states * target)
    if config.get("fc_norm"):
        made |= {f"fc_norm.{number}.weight": norm(target) for number in range(states)}
    if draft < VOCABULARY:
        marks = torch.zeros(VOCABULARY, dtype=torch.bool)
        marks[IDS] = True
        made |= {"d2t": IDS - torch.arange(draft), "t2d": marks}
    return made


def first_layer(config: Mapping[str, Any]) -> str:
    """Return the prefix of the tensors of the first layer in a format."""
    return "layers.0." if {"speculators_model_type", "eagle_config"} & {*config} else "midlayer."


def written(folder: Path, config: Mapping[str, Any], tensors: Tensors, pickled: bool = False) -> Path:
    """Write the files of a head and return their folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def without(config: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def normed(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS) * weight


def attended(
    tensors: Tensors, prefix: str, inputs: torch.Tensor, places: torch.Tensor, visible: torch.Tensor, theta: float
) -> torch.Tensor:
    """Return the attention of rows (n, ...) at positions `places` (n,) over themselves, masked by `visible` (n, n)."""

    def projected(name: str) -> torch.Tensor:
        weight, bias = (tensors.get(f"{prefix}{name}_proj.{kind}") for kind in ("weight", "bias"))
        made = linear(inputs, weight, bias).view(len(inputs), -1, DIM).transpose(0, 1)
        scale = tensors.get(f"{prefix}{name}_norm.weight")
        return made if scale is None else normed(made, scale)

    def rotated(states: torch.Tensor) -> torch.Tensor:
        angles = places[:, None] * theta ** (-torch.arange(0, DIM, 2) / DIM)
        cos, sin = angles.cos(), angles.sin()
        low, high = states.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    queries, keys, values = rotated(projected("q")), rotated(projected("k")), projected("v")
    keys, values = (one.repeat_interleave(HEADS // len(one), dim=0) for one in (keys, values))
    scores = (queries @ keys.transpose(1, 2) / DIM**0.5).masked_fill(~visible, float("-inf"))
    mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(inputs), -1)
    return linear(mixed, tensors[f"{prefix}o_proj.weight"], tensors.get(f"{prefix}o_proj.bias"))


def after_attention(tensors: Tensors, prefix: str, states: torch.Tensor) -> torch.Tensor:
    inner = normed(states, tensors[f"{prefix}post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return states + linear(silu(linear(inner, gate)) * linear(inner, up), down)


def outputs_of(
    config: Mapping[str, Any],
    tensors: Tensors,
    embedded: torch.Tensor,
    states: torch.Tensor,
    places: torch.Tensor,
    visible: torch.Tensor | None = None,
    theta: float = 10000.0,
) -> torch.Tensor:
    """Return a head's outputs for embeddings and states (n, WIDTH), the states already being in the head's space."""
    visible = torch.ones(len(places), len(places), dtype=torch.bool).tril() if visible is None else visible
    inner = config.get("transformer_layer_config", config)
    if "sliding_attention" in inner.get("layer_types", ()):
        visible = visible & (places > places[:, None] - inner["sliding_window"])

    def layer(prefix: str, inputs: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        found = attended(tensors, f"{prefix}self_attn.", inputs, places, visible, theta)
        return after_attention(tensors, prefix, residual + found)

    if "lm_head.weight" not in tensors:
        x = linear(torch.cat([embedded, states], -1), tensors["fc.weight"], tensors.get("fc.bias"))
        return layer("layers.0.", x, x)
    first = first_layer(config)
    hidden = normed(states, tensors[f"{first}hidden_norm.weight"])
    both = torch.cat([normed(embedded, tensors[f"{first}input_layernorm.weight"]), hidden], -1)
    made = layer(first, both, hidden if config.get("norm_before_residual") else states)
    for number in range(1, inner["num_hidden_layers"]):
        prefix = f"layers.{number}."
        made = layer(prefix, normed(made, tensors[f"{prefix}input_layernorm.weight"]), made)
    return made


def own_states(config: Mapping[str, Any], tensors: Tensors, states: torch.Tensor) -> torch.Tensor:
    """Return the head's states for the target's concatenated states (n, width)."""
    if "lm_head.weight" not in tensors:
        return states
    if config.get("norm_before_fc"):
        states = normed(states, tensors["input_norm.weight"])
    if config.get("fc_norm"):
        each = states.split(config.get("target_hidden_size") or WIDTH, dim=-1)
        states = torch.cat([normed(one, tensors[f"fc_norm.{number}.weight"]) for number, one in enumerate(each)], -1)
    return linear(states, tensors["fc.weight"], tensors.get("fc.bias"))


def counting_head(folder: Path, model: PreTrainedModel) -> Path:
    """Write an EAGLE-1 head for the counting llama: its state is the embedding of the input token."""
    head, width = new_head(model, Continuations([], []), EagleTraining(version=1)), model.config.hidden_size
    with torch.no_grad():
        for weight in head.parameters():
            weight.zero_()
        head.fc.weight.copy_(torch.cat([torch.eye(width), torch.zeros(width, width)], dim=1))
    save_head(folder, head, model)
    return folder
