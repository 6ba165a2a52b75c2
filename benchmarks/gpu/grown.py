"""Embed a small trained model in the shape of a larger model: the same output at the larger model's cost.

    python -m benchmarks.gpu.grown build/grown/8B --shape 8B

End-to-end speedup depends on the text and on the cost of a forward pass. A small model is too cheap for a large GPU,
and the output of a large model with random weights does not resemble text. So a trained model's weights are copied into
larger matrices of zeros: the added hidden dimensions stay zero, and added heads, feed-forward rows and layers
contribute nothing. In exact arithmetic the logits, and with them the acceptance of every draft, equal the small
model's. Dense kernels take as long for zeros as for other weights.

Tokenizer and vocabulary remain the small model's, so the output layer is smaller than that of the shape.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.real_model import fetched
from token_recycling.model import loading

from .shapes import SHAPES, Shape


def grown(small: LlamaForCausalLM, shape: Shape) -> LlamaForCausalLM:
    """Return a model with the logits of `small` and the widths of `shape`; raises ValueError if `small` is wider.

    Vocabulary and head size are those of `small`. The model has at least as many layers as `small`.
    """
    config, head = small.config, small.config.head_dim
    heads = shape.hidden_size // head
    shared = heads * shape.num_key_value_heads // shape.num_attention_heads
    wide = LlamaConfig(
        **{
            **config.to_dict(),
            **_widths(shape),
            "num_hidden_layers": max(shape.num_hidden_layers, config.num_hidden_layers),
            "vocab_size": config.vocab_size,
            "head_dim": head,
            "num_attention_heads": heads,
            "num_key_value_heads": shared,
            "rms_norm_eps": config.rms_norm_eps * config.hidden_size / shape.hidden_size,
            "dtype": small.dtype,
        }
    )
    small_group, group = config.num_attention_heads // config.num_key_value_heads, heads // max(1, shared)
    places = _heads(config.num_attention_heads, small_group, group)
    fits = (
        config.hidden_size <= shape.hidden_size
        and config.intermediate_size <= shape.intermediate_size
        and max(places) < heads
    )
    if not fits:
        raise ValueError(f"{shape} is too narrow for a model of width {config.hidden_size}; choose a larger shape")
    with torch.device("meta"):
        large = LlamaForCausalLM(wide)
    large = large.to_empty(device=small.device).to(small.dtype).eval()
    with torch.no_grad():
        for weight in large.parameters():
            weight.zero_()
        large.model.rotary_emb = type(large.model.rotary_emb)(wide).to(small.device)
        scale = (config.hidden_size / shape.hidden_size) ** 0.5
        _put(large.model.embed_tokens.weight, small.model.embed_tokens.weight)
        _put(large.lm_head.weight, small.lm_head.weight)
        _put(large.model.norm.weight, small.model.norm.weight * scale)
        for into, layer in zip(large.model.layers, small.model.layers, strict=False):
            _put(into.input_layernorm.weight, layer.input_layernorm.weight * scale)
            _put(into.post_attention_layernorm.weight, layer.post_attention_layernorm.weight * scale)
            for name in ("gate_proj", "up_proj", "down_proj"):
                _put(getattr(into.mlp, name).weight, getattr(layer.mlp, name).weight)
            own, theirs = into.self_attn, layer.self_attn  # whose heads have one size in both
            for query, place in enumerate(places):
                key, at = query // small_group, place // group
                for name, from_, to in (("q_proj", query, place), ("k_proj", key, at), ("v_proj", key, at)):
                    rows = getattr(theirs, name).weight[from_ * head : (from_ + 1) * head]
                    _put(getattr(own, name).weight[to * head : (to + 1) * head], rows)
                columns = theirs.o_proj.weight[:, query * head : (query + 1) * head]
                _put(own.o_proj.weight[:, place * head : (place + 1) * head], columns)
    large.tie_weights()
    large.generation_config = small.generation_config
    return large


def _widths(shape: Shape) -> dict[str, int]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return {name: getattr(shape, name) for name in names}


def _heads(heads: int, small_group: int, group: int) -> list[int]:
    """Return the positions of the small model's heads: heads that share keys still do, or each gets its own keys."""
    if group < small_group:
        return [query * group for query in range(heads)]
    return [query // small_group * group + query % small_group for query in range(heads)]


def _put(into: torch.Tensor, weight: torch.Tensor) -> None:
    into[tuple(slice(size) for size in weight.shape)] = weight


def main(
    output: Annotated[Path, typer.Argument(help="folder of the new model")],
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "8B",
    model: Annotated[str | None, typer.Option(help="folder or .gguf file of a llama; default SmolLM2-135M")] = None,
) -> None:
    """Write the grown model and its tokenizer to a folder, unless the folder has them."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"unknown shape {shape}; choose from {', '.join(SHAPES)}")
    if (output / "config.json").exists():
        print(f"{output} already exists and is kept")
        return
    small = loading.load(model or str(fetched()), "bfloat16", "cpu", None, False)
    large = grown(small.model, SHAPES[shape])
    small.tokenizer.save_pretrained(output)
    large.save_pretrained(output)
    print(f"{output}: {large.num_parameters():,} parameters")


if __name__ == "__main__":
    typer.run(main)
