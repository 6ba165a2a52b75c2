"""Quantised models: weights alone are accelerated; activations by which logits depend on the size of a pass are not."""

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


def test_activations_that_share_a_scale_are_refused_without_trying():
    model = packed(torch.qint8)
    found = tr.check(model)
    assert DEPENDS in str(found.reason)
    assert "model.layers.0.self_attn.q_proj" in str(found.reason)
    assert_refused(model, "share one scale")


def test_packed_weights_of_float16_are_accelerated():
    model = packed(torch.float16)
    assert Target(model).vocab_size == 64
    assert "LlamaForCausalLM (quantised) is not among those tested: a self-test decides" in tr.check(model).notes
    assert_exact(model)


class Coarse(torch.nn.Linear):
    """Rounds what it is given to as many levels as an int8 has, on one scale for all rows."""

    def forward(self, states):
        step = states.abs().max() / 127
        return super().forward((states / step).round() * step)


@pytest.fixture
def coarse(model):
    """A quantised model of a kind that nobody knows, of a family that was tested."""
    for module in [module for module in model.modules() if type(module) is torch.nn.Linear]:
        module.__class__ = Coarse
    return model


def test_what_is_not_recognised_is_found_by_the_self_test(coarse):
    found = tr.check(coarse, self_test=True)
    assert DEPENDS in str(found.reason)
    assert_refused(coarse, "are rounded coarsely")


def test_a_quantised_model_of_a_tested_family_is_tried_before_it_is_accelerated(coarse):
    assert tr.why_not(coarse) is None
    coarse.is_quantized = True  # as transformers marks what it has loaded so
    assert_refused(coarse, DEPENDS)


@pytest.fixture
def torchao():
    """Where it is installed: once it is, lines are printed wherever transformers is imported."""
    return pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_weights_alone_that_torchao_packed_are_accelerated(model, torchao, kind):
    torchao.quantize_(model, getattr(torchao, kind)())
    assert Target(model).vocab_size == 64
    assert_exact(model)


def test_activations_that_torchao_rounds_are_refused(torchao):
    """With one scale at sight; with one for each token where the self-test finds it."""
    for how, reason in ({"granularity": torchao.PerTensor()}, "share one scale"), ({}, "are rounded coarsely"):
        model = tiny.llama(context=1, num_hidden_layers=4)
        torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig(**how))
        assert tr.check(model).supported == (not how)
        assert_refused(model, reason)
