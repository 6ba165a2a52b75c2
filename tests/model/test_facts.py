"""Facts cached for a model are valid as long as its weights, and leave no trace in the model."""

import copy
import gc
import logging
import types
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from support import tiny
from support.cases import thinned
from transformers import LlamaForCausalLM

import token_recycling as tr
from token_recycling.model import facts
from token_recycling.model.facts import Identities, facts_of
from token_recycling.model.info import model_info
from token_recycling.model.inspection import weights_fingerprint


def fact(model, key, make, of="numbers"):
    return facts_of(model).get(key, make, of)


@pytest.fixture
def numbers():
    """A function that returns 0, 1, 2, ...: its number of earlier calls."""
    calls = count()
    return lambda: next(calls)


def train(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tiny.prompt(0, 5)).logits.sum().backward()
    optimiser.step()


def load(model):
    model.load_state_dict(tiny.llama(1).state_dict())


def replace(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def swap(model):
    weight = model.lm_head.weight
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach().clone()))


NEW_VALUES = [train, load]
NEW_TENSORS: list[Callable[[LlamaForCausalLM], Any]] = [
    replace,
    swap,
    lambda model: model.to(torch.bfloat16),
    lambda model: model.to("meta"),
    lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
]


def test_fact_is_computed_once_per_model_and_key(model, numbers):
    assert [fact(model, "a", numbers) for _ in range(3)] == [0, 0, 0]
    assert fact(model, ("a", 1), numbers) == 1
    assert fact(tiny.llama(), "a", numbers) == 2
    assert [fact(model, "a", numbers), fact(model, ("a", 1), numbers)] == [0, 1]


@pytest.mark.parametrize("change", [*NEW_VALUES, *NEW_TENSORS])
def test_facts_are_forgotten_when_weights_change(model, numbers, change):
    """Facts of the form survive new values, but not new tensors."""
    assert [fact(model, "a", numbers, of) for of in ("numbers", "form")] == [0, 1]
    change(model)
    assert [fact(model, "a", numbers) for _ in range(2)] == [2, 2]
    assert fact(model, "a", numbers, of="form") == (1 if change in NEW_VALUES else 3)


def test_warning_is_logged_once_per_model(model, caplog):
    """A training step does not repeat it."""
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        for _ in range(2):
            facts_of(model).warn_once("one")
            facts_of(model).warn_once("two")
            train(model)
        facts_of(tiny.llama()).warn_once("one")
    assert [record.getMessage() for record in caplog.records] == ["one", "two", "one"]


def test_weights_created_in_inference_mode(numbers):
    """They have no version counter; generation works inside and outside of that mode."""
    wanted = tiny.llama().generate(tiny.prompt(0, 6), max_new_tokens=12)
    with torch.inference_mode():
        model = tiny.llama()
        assert model.lm_head.weight.is_inference()
        assert [fact(model, "a", numbers) for _ in range(2)] == [0, 0]
        for fast in (False, True):
            assert torch.equal(tr.generate(model, tiny.prompt(0, 6), fast=fast, max_new_tokens=12), wanted)
    assert fact(model, "a", numbers) == 0
    assert torch.equal(tr.generate(model, tiny.prompt(0, 6), max_new_tokens=12), wanted)
    with torch.inference_mode():
        model.load_state_dict(tiny.llama(1).state_dict())
        other = tiny.llama(1).generate(tiny.prompt(0, 6), max_new_tokens=12)
        for fast in (False, True):
            assert torch.equal(tr.generate(model, tiny.prompt(0, 6), fast=fast, max_new_tokens=12), other)


def test_copy_has_its_own_facts(model, numbers):
    fact(model, "a", numbers)
    other = copy.deepcopy(model)
    assert [fact(one, "a", numbers) for one in (other, model, other)] == [1, 0, 1]


@pytest.mark.parametrize("fast", thinned([True, False], 2))
def test_unused_model_is_freed_without_the_garbage_collector(fast):
    model, ids = tiny.llama(), tiny.prompt(0, 6)
    tr.generate(model, ids, fast=fast, max_new_tokens=12)
    list(tr.stream(model, ids, drafter="layer_skip:layers=1", fast=fast, max_new_tokens=12))
    tr.accelerate(model, "fuse:recycling+suffix", fast=fast).generate(ids, max_new_tokens=12)
    gone, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
        assert weight() is None
    finally:
        gc.enable()


def hook_that_holds_the_model(model):
    model.model.layers[0].register_forward_hook(lambda layer, args, output: model.config and output)


def method_that_holds_the_model(model):
    model.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), model)


@pytest.mark.parametrize("hold", [hook_that_holds_the_model, method_that_holds_the_model])
@pytest.mark.falls_back
def test_model_whose_code_holds_it_is_garbage_collected(hold):
    model = tiny.llama()
    hold(model)
    tr.accelerate(model).generate(tiny.prompt(0, 6), max_new_tokens=12)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_facts_survive_the_replacement_of_offloaded_weights(model, numbers):
    """accelerate loads them for a forward pass, then replaces them by new meta tensors."""
    cpu_offload(model, execution_device=torch.device("cpu"))
    before = [id(weight) for weight in model.parameters()]
    assert fact(model, "a", numbers) == 0
    model(tiny.prompt(0, 5))
    assert [id(weight) for weight in model.parameters()] != before
    assert fact(model, "a", numbers) == 0


# Facts computed from a model


class Adapter(torch.nn.Linear):
    """Another class of layer."""


class Incomparable:
    """A value whose comparison raises."""

    def __eq__(self, other):
        raise ValueError


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.lm_head, "__class__", Adapter),
        lambda model: model.config.rope_parameters.update(factor=2.0),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: setattr(model.config, "sliding_window", 8),
        lambda model: setattr(model, "is_quantized", True),
        lambda model: model.add_module("more", torch.nn.Identity()),
    ],
)
def test_model_info_is_cached_until_the_model_changes(model, change):
    info = model_info(model)
    assert model_info(model) is info
    change(model)
    assert model_info(model) is not info
    assert model_info(model) is model_info(model)


def test_model_info_reflects_changes(model):
    assert model_info(model).attention == "sdpa"
    model.set_attn_implementation("eager")
    assert model_info(model).attention == "eager"
    model.config.is_causal = False
    assert "not causal" in str(model_info(model).reason)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: [torch.ones(3)],
        lambda: {"of": np.ones(3)},
        lambda: {1: "integers among", "names": 2},
        Incomparable,
    ],
)
def test_configuration_and_class_may_hold_incomparable_or_unserializable_values(model, make, monkeypatch):
    call = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**call)
    with tr.accelerated(model):
        for holder in (model.config, type(model)):
            for _ in range(2):
                monkeypatch.setattr(holder, "extra", make(), raising=False)
                assert torch.equal(model.generate(**call), expected)
                assert model.acceleration.fallback is None
        facts = facts_of(model)
    assert facts_of(model) is facts
    fingerprint = weights_fingerprint(model)
    model.config.extra = None
    assert weights_fingerprint(model) != fingerprint


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3), lambda: torch.nn.Parameter(torch.ones(3)), torch.nn.Identity, lambda: lambda: 1]
)
def test_collected_object_differs_from_a_later_one(make):
    """Even if the later one reuses its id and its memory."""
    one, other = make(), make()
    before, later = (Identities([one, other]).watch() for _ in range(2))
    assert before == later
    del other
    assert before != later


def test_call_examines_the_model_once(monkeypatch):
    """A call without `accelerate` does so twice: before transformers prepares it, and afterwards."""
    examined, fingerprint = [], facts.Fingerprint
    monkeypatch.setattr(facts, "Fingerprint", lambda model: examined.append(model) or fingerprint(model))
    model, ids, arguments = tr.accelerate(tiny.llama()), tiny.prompt(0, 5), {"max_new_tokens": 4, "do_sample": False}
    examined.clear()
    model.generate(ids, **arguments)
    assert len(examined) == 1
    tr.generate(tiny.llama(), ids, **arguments)
    assert len(examined) == 1 + 2
