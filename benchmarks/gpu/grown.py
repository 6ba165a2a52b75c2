"""The shipped model in the shape of a larger one: it says the same, and costs as much as one of that shape.

    python -m benchmarks.gpu.grown build/grown/7B --shape 7B

How much faster whole texts are written depends on what a model says and on what its passes cost. A small model is too
cheap for a large card, and a large one with random weights says nothing that is like a text. So the weights of the
shipped model are put into larger ones of zeros: wider states, in which the rest stays zero; more heads and more rows of
the feed-forward layers, whose outputs count nothing; and more layers, which add nothing. In exact arithmetic the logits
are those of the shipped model. Weights that are zero take as long as others on every device that computes densely.

The tokenizer and its vocabulary stay the shipped model's, so that the output layer is smaller than the shape's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from .shapes import SHAPES, Shape

ROOT = Path(__file__).parents[2]


def grown(small: LlamaForCausalLM, shape: Shape) -> LlamaForCausalLM:
    """A model of that shape, but for the vocabulary and the size of its heads, that says what `small` says. Raises
    ValueError for a shape that `small` does not fit into.
    """
    config, head = small.config, small.config.head_dim
    heads = shape.hidden_size // head
    shared = heads * shape.num_key_value_heads // shape.num_attention_heads
    wide = LlamaConfig(
        **{
            **config.to_dict(),
            **vars(shape),
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
        and config.num_hidden_layers <= shape.num_hidden_layers
        and max(places) < heads
    )
    if not fits:
        raise ValueError(f"expected a shape that holds {config.hidden_size} x {config.num_hidden_layers}, got {shape}")
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


def _heads(heads: int, small_group: int, group: int) -> list[int]:
    """Where the heads of the small model go, so that those that share keys still do, or each has keys of its own."""
    if group < small_group:
        return [query * group for query in range(heads)]
    return [query // small_group * group + query % small_group for query in range(heads)]


def _put(into: torch.Tensor, weight: torch.Tensor) -> None:
    into[tuple(slice(size) for size in weight.shape)] = weight


def main(
    output: Annotated[Path, typer.Argument(help="folder of the new model")],
    shape: Annotated[str, typer.Option(help=f"one of {', '.join(SHAPES)}")] = "1B",
    model: Annotated[Path, typer.Option(help="folder of a llama")] = ROOT / "models" / "target",
) -> None:
    """See the module."""
    if shape not in SHAPES:
        raise typer.BadParameter(f"expected a shape of {', '.join(SHAPES)}, got {shape}")
    large = grown(AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16), SHAPES[shape])
    large.save_pretrained(output)
    AutoTokenizer.from_pretrained(model).save_pretrained(output)
    print(f"{output}: {large.num_parameters():,} parameters")


if __name__ == "__main__":
    typer.run(main)
