"""Weight-only quantized models are accelerated; activations whose rounding depends on the pass size are refused."""

import warnings
from typing import Any

import pytest
import torch
from support import tiny
from torch.ao.quantization import quantize_dynamic

import token_recycling as tr
from token_recycling.model.target import Target

DEPENDS = "the logits of LlamaForCausalLM depend on how many tokens are read at once"
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}


def packed(dtype):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return quantize_dynamic(tiny.llama(), {torch.nn.Linear}, dtype=dtype)


def assert_refused(model, reason):
    for attempt in (tr.accelerate, lambda model: tr.generate(model, tiny.prompt(0, 6), **GREEDY)):
        with pytest.raises(tr.UnsupportedModelError, match=reason):
            attempt(model)


def assert_exact(model):
    found = tr.check(model, self_test=True)
    assert found.supported
    assert found.difference is not None
    for seed in range(3):
        ids = tiny.prompt(seed, 6)
        wanted = model.generate(ids, **GREEDY)
        assert torch.equal(tr.generate(model, ids, **GREEDY), wanted)


def test_activations_with_a_shared_scale_are_refused_without_a_self_test():
    model = packed(torch.qint8)
    found = tr.check(model)
    assert DEPENDS in str(found.reason)
    assert "model.layers.0.self_attn.q_proj" in str(found.reason)
    assert_refused(model, "share one scale")


def test_float16_packed_weights_are_accelerated():
    model = packed(torch.float16)
    assert Target(model).vocab_size == 64
    assert "LlamaForCausalLM (quantized) is not among those tested: a self-test decides" in tr.check(model).notes
    assert_exact(model)


class Coarse(torch.nn.Linear):
    """Round inputs to int8 levels, with one scale for all rows."""

    def forward(self, states):
        step = states.abs().max() / 127
        return super().forward((states / step).round() * step)


class Halved(torch.nn.Linear):
    """Round inputs to 16 bits, each row by itself: only near the limits of rounding do other passes differ."""

    def forward(self, states):
        return super().forward(states.bfloat16().float())


@pytest.fixture(params=[Coarse, Halved])
def coarse(request):
    """A model of a tested family, quantized in an unknown way."""
    model = tiny.llama(num_hidden_layers=6)
    for module in [module for module in model.modules() if type(module) is torch.nn.Linear]:
        module.__class__ = request.param
    return model


def test_self_test_finds_unrecognized_rounding_of_activations(coarse):
    found = tr.check(coarse, self_test=True)
    assert DEPENDS in str(found.reason)
    assert_refused(coarse, "are rounded coarsely")


def test_quantized_model_of_a_tested_family_is_self_tested(coarse):
    assert tr.why_not(coarse) is None
    coarse.is_quantized = True  # as transformers marks loaded quantized models
    assert_refused(coarse, DEPENDS)


@pytest.fixture
def torchao():
    """Skip unless torchao is installed, which prints lines wherever transformers is imported."""
    return pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_weight_only_torchao_models_are_accelerated(model, torchao, kind):
    torchao.quantize_(model, getattr(torchao, kind)())
    assert Target(model).vocab_size == 64
    assert_exact(model)


def test_torchao_models_with_quantized_activations_are_refused(torchao):
    """One scale per tensor is refused immediately, one per token by the self-test."""
    for how, reason in ({"granularity": torchao.PerTensor()}, "share one scale"), ({}, "are rounded coarsely"):
        model = tiny.llama(context=1, num_hidden_layers=4)
        torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig(**how))
        assert tr.check(model).supported == (not how)
        assert_refused(model, reason)
