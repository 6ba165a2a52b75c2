"""Compare outputs on a device with those of `generate`. They may diverge at near-ties: even in float32 an accelerator
uses other kernels for a pass over one token than for a tree.
"""

from __future__ import annotations

from typing import Any

import torch
from support import tiny
from support.nested import mapped
from transformers import LlamaForCausalLM, PreTrainedModel

from token_recycling.bench.measure import first_divergence

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.125, torch.float16: 0.016}
"""Maximum difference between the logits of two tokens at which outputs diverge; logits of these models reach 8."""
CAPTURED = "captured as CUDA graphs"


def moved(given: Any, device: torch.device) -> Any:
    """Return nested arguments with their tensors on a device."""
    return mapped(lambda tensor: tensor.to(device), given)


def check_same(model: PreTrainedModel, given: dict[str, Any], ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """Assert that outputs (rows, length) are equal or diverge at a near-tie; the prompts `given` may be left-padded."""
    ids = given["input_ids"]
    masks, width = given.get("attention_mask", torch.ones_like(ids)).bool(), ids.shape[1]
    assert ours.shape[0] == wanted.shape[0]
    for row, (own, theirs) in enumerate(zip(ours, wanted, strict=True)):
        several = len(wanted) // len(ids)
        prompt = ids[row // several][masks[row // several]]
        parted = first_divergence(model, prompt, theirs[width:].tolist(), own[width:].tolist())
        if parted is not None:
            assert parted.margin is not None, f"one output ends where the other continues: {parted}"
            assert abs(parted.margin) <= TOLERANCE[model.dtype], str(parted)


def check_path(stats: Any, device: torch.device) -> None:
    """Assert that forward passes had fixed shapes, and on CUDA that they were captured."""
    assert stats.path.startswith("fast"), stats.path
    assert device.type != "cuda" or CAPTURED in stats.path, stats.path


def medium(device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """Return a random llama in sizes that fast kernels support: heads of 64, rows of 512, a context of 4,096."""
    return tiny.llama(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.08,
    ).to(device, dtype)
