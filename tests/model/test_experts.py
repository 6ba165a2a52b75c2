"""Experts of a mixture are computed as transformers computes them: while it decodes another way than in a prompt."""

from __future__ import annotations

import pytest
import torch
from support import architectures, tiny

import token_recycling as tr
from token_recycling.model.target import Target

MIXTURES = ["mixtral", "qwen3_moe", "qwen2_moe"]


@pytest.mark.parametrize("family", MIXTURES)
def test_passes_over_drafts_on_an_accelerator_use_the_experts_of_decoding(family, monkeypatch):
    model = architectures.model_of(architectures.named(family))
    model.set_experts_implementation("grouped_mm")
    target = Target(model)
    with target._experts():
        assert {*model.get_experts_implementation().values()} == {"grouped_mm"}, "on a CPU they stay"
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    target.device = torch.device("cuda")
    with target._experts():
        assert "batched_mm" in model.get_experts_implementation().values()
    assert {*model.get_experts_implementation().values()} == {"grouped_mm"}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_call_leaves_the_implementation_as_it_was(family):
    model = architectures.model_of(architectures.named(family))
    model.set_experts_implementation("grouped_mm")
    ids = tiny.prompt(0, 9, architectures.VOCABULARY)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(tr.generate(model, ids, max_new_tokens=12, do_sample=False), plain)
    assert {*model.get_experts_implementation().values()} == {"grouped_mm"}
