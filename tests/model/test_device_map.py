"""Copies of what drafts, where a target is."""

from __future__ import annotations

import torch
from support import tiny

from token_recycling.model.device_map import placed_copy


def test_a_copy_has_the_type_of_the_target_but_for_its_buffers():
    """Frequencies of positions need all their bits; the original stays as it is."""
    model = tiny.llama().train()
    copied = placed_copy(model, torch.device("cpu"), torch.bfloat16)
    assert {weight.dtype for weight in copied.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in copied.buffers()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not copied.training
    assert not any(weight.requires_grad for weight in copied.parameters())
    assert model.training
