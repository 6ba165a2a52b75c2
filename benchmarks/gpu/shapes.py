"""Shapes of models with random weights: the cost of a step does not depend on the values of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


@dataclass(frozen=True)
class Shape:
    """The part of a llama's configuration that determines its cost."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    window: int | None = None
    """Size of the sliding window of every layer, as in Mistral; None: no window."""
    experts: int = 0
    """Number of experts per layer, of which a token uses eight, as in Qwen3-MoE; 0: a dense model."""


SHAPES = {  # Llama 3.2 1B and 3B, Llama 3 8B (grouped queries), Llama 2 7B (a key head for each query)
    "tiny": Shape(64, 2, 4, 2, 96, 512),
    "small": Shape(512, 8, 8, 4, 1024, 32000),
    "1B": Shape(2048, 16, 32, 8, 8192, 128256),
    "3B": Shape(3072, 28, 24, 8, 8192, 128256),
    "8B": Shape(4096, 32, 32, 8, 14336, 128256),
    "7B": Shape(4096, 32, 32, 32, 11008, 32000),
    "window": Shape(4096, 32, 32, 8, 14336, 32000, window=4096),  # Mistral 7B
    "experts": Shape(2048, 24, 32, 4, 768, 151936, experts=128),  # half of Qwen3-30B-A3B's layers
    "tiny window": Shape(64, 2, 4, 2, 96, 512, window=16),
    "tiny experts": Shape(64, 2, 4, 2, 32, 512, experts=16),
}


def made(shape: str, longest: int, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Return a model of a shape with random weights, for sequences of up to `longest` tokens."""
    sizes = dict(vars(SHAPES[shape]))
    window, experts = sizes.pop("window"), sizes.pop("experts")
    shared = {"max_position_embeddings": longest, "bos_token_id": None, "eos_token_id": None, "dtype": dtype}
    torch.manual_seed(0)
    with _defaults(device, dtype):
        if experts:
            sizes |= {"num_experts": experts, "num_experts_per_tok": 8, "head_dim": 128 if experts > 16 else 16}
            sizes["moe_intermediate_size"] = sizes["intermediate_size"]
            return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **shared)).eval()
        if window is not None:
            return MistralForCausalLM(MistralConfig(**sizes, **shared, sliding_window=window)).eval()
        return LlamaForCausalLM(LlamaConfig(**sizes, **shared)).eval()


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
