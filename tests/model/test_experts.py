"""Experts use the implementation that transformers uses, which differs between prompts and decoding."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support import architectures, tiny
from support.cases import thinned

import token_recycling as tr
from token_recycling import Draft
from token_recycling.model.target import Target

MIXTURES = ["mixtral", "qwen3_moe", "qwen2_moe"]


@pytest.mark.parametrize("family", MIXTURES)
def test_draft_passes_on_an_accelerator_use_the_decoding_implementation(family):
    model = architectures.model_of(architectures.named(family))
    model.set_experts_implementation("grouped_mm")
    target, seen = Target(model), []
    model.register_forward_pre_hook(lambda *_: seen.append({*model.get_experts_implementation().values()}))
    target.forward(target.inputs.of([Draft([5, 7, 9], [-1, 0, 0])], [0], 0), target.new_cache())
    assert seen == [{"grouped_mm"}], "unchanged on a CPU"
    for fails in (False, True):
        with contextlib.suppress(MemoryError), target._experts_of_decoding():
            assert "batched_mm" in model.get_experts_implementation().values()
            if fails:
                raise MemoryError
        assert {*model.get_experts_implementation().values()} == {"grouped_mm"}


@pytest.mark.parametrize("family", thinned(MIXTURES))
def test_experts_implementation_is_restored_after_a_call(family):
    model = architectures.model_of(architectures.named(family))
    model.set_experts_implementation("grouped_mm")
    ids = tiny.prompt(0, 9, architectures.VOCABULARY)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(tr.generate(model, ids, max_new_tokens=12, do_sample=False), plain)
    assert {*model.get_experts_implementation().values()} == {"grouped_mm"}
