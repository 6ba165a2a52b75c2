"""Llama shapes with random weights: what a step costs does not depend on what the weights say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass(frozen=True)
class Shape:
    """What of a llama's configuration decides what it costs."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int


SHAPES = {  # Llama 3.2 1B and 3B, Llama 3 8B (grouped queries), Llama 2 7B (a key head for each query)
    "tiny": Shape(64, 2, 4, 2, 96, 512),
    "small": Shape(512, 8, 8, 4, 1024, 32000),
    "1B": Shape(2048, 16, 32, 8, 8192, 128256),
    "3B": Shape(3072, 28, 24, 8, 8192, 128256),
    "8B": Shape(4096, 32, 32, 8, 14336, 128256),
    "7B": Shape(4096, 32, 32, 32, 11008, 32000),
}


def made(shape: str, longest: int, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A llama of that shape with random weights, for texts of `longest` tokens."""
    config = LlamaConfig(
        **vars(SHAPES[shape]), max_position_embeddings=longest, bos_token_id=None, eos_token_id=None, dtype=dtype
    )
    torch.manual_seed(0)
    with _defaults(device, dtype):
        return LlamaForCausalLM(config).eval()


@contextmanager
def _defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)
