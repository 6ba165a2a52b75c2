"""What is remembered of a model lasts as long as its weights do, and leaves no trace in the model."""

import copy
import gc
import logging
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
from token_recycling.model.facts import Identities, facts_of
from token_recycling.model.info import model_info
from token_recycling.model.inspection import weights_fingerprint


def remembered(model, what, make, of="numbers"):
    return facts_of(model).get(what, make, of)


@pytest.fixture
def numbers():
    """0, 1, 2, ...: a number for each time that something is made."""
    made = count()
    return lambda: next(made)


def trained(model):
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model(tiny.prompt(0, 5)).logits.sum().backward()
    optimiser.step()


def loaded(model):
    model.load_state_dict(tiny.llama(1).state_dict())


def replaced(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())


def swapped(model):
    weight = model.lm_head.weight
    torch.utils.swap_tensors(weight, torch.nn.Parameter(weight.detach().clone()))


NEW_VALUES = [trained, loaded]
NEW_TENSORS: list[Callable[[LlamaForCausalLM], Any]] = [
    replaced,
    swapped,
    lambda model: model.to(torch.bfloat16),
    lambda model: model.to("meta"),
    lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
]


def test_a_thing_is_made_once(model, numbers):
    assert [remembered(model, "a", numbers) for _ in range(3)] == [0, 0, 0]
    assert remembered(model, ("a", 1), numbers) == 1
    assert remembered(tiny.llama(), "a", numbers) == 2
    assert [remembered(model, "a", numbers), remembered(model, ("a", 1), numbers)] == [0, 1]


@pytest.mark.parametrize("change", [*NEW_VALUES, *NEW_TENSORS])
def test_facts_are_forgotten_when_weights_change(model, numbers, change):
    """Those that do not depend on the numbers in them, with the tensors alone."""
    assert [remembered(model, "a", numbers, of) for of in ("numbers", "form")] == [0, 1]
    change(model)
    assert [remembered(model, "a", numbers) for _ in range(2)] == [2, 2]
    assert remembered(model, "a", numbers, of="form") == (1 if change in NEW_VALUES else 3)


def test_a_warning_is_given_once(model, caplog):
    """A training step is no reason to say it again."""
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        for _ in range(2):
            facts_of(model).say_once("one")
            facts_of(model).say_once("two")
            trained(model)
        facts_of(tiny.llama()).say_once("one")
    assert [record.getMessage() for record in caplog.records] == ["one", "two", "one"]


def test_weights_made_in_inference_mode(numbers):
    """They have no version; generating works within that mode and outside of it."""
    wanted = tiny.llama().generate(tiny.prompt(0, 6), max_new_tokens=12)
    with torch.inference_mode():
        model = tiny.llama()
        assert model.lm_head.weight.is_inference()
        assert [remembered(model, "a", numbers) for _ in range(2)] == [0, 0]
        for fast in (False, True):
            assert torch.equal(tr.generate(model, tiny.prompt(0, 6), fast=fast, max_new_tokens=12), wanted)
    assert remembered(model, "a", numbers) == 0
    assert torch.equal(tr.generate(model, tiny.prompt(0, 6), max_new_tokens=12), wanted)
    with torch.inference_mode():
        model.load_state_dict(tiny.llama(1).state_dict())
        other = tiny.llama(1).generate(tiny.prompt(0, 6), max_new_tokens=12)
        for fast in (False, True):
            assert torch.equal(tr.generate(model, tiny.prompt(0, 6), fast=fast, max_new_tokens=12), other)


def test_a_copy_remembers_for_itself(model, numbers):
    remembered(model, "a", numbers)
    other = copy.deepcopy(model)
    assert [remembered(one, "a", numbers) for one in (other, model, other)] == [1, 0, 1]


@pytest.mark.parametrize("fast", thinned([True, False], 2))
def test_a_model_that_is_no_longer_used_is_gone(fast):
    model, ids = tiny.llama(), tiny.prompt(0, 6)
    tr.generate(model, ids, fast=fast, max_new_tokens=12)
    list(tr.stream(model, ids, drafter="layer_skip:layers=1", fast=fast, max_new_tokens=12))
    tr.accelerate(model, "fuse:recycling+suffix", fast=fast).generate(ids, max_new_tokens=12)
    gone, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    del model
    gc.collect()
    assert gone() is None
    assert weight() is None


def test_offloaded_weights_are_other_tensors_after_every_pass_and_the_model_the_same(model, numbers):
    """accelerate brings them for a pass, and puts new ones without numbers in their place."""
    cpu_offload(model, execution_device=torch.device("cpu"))
    held = [id(weight) for weight in model.parameters()]
    assert remembered(model, "what", numbers) == 0
    model(tiny.prompt(0, 5))
    assert [id(weight) for weight in model.parameters()] != held
    assert remembered(model, "what", numbers) == 0


# What is found in a model


class Adapter(torch.nn.Linear):
    """Another kind of part."""


class Incomparable:
    """Raises when it is compared."""

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
def test_facts_about_a_model_are_found_once_and_again_when_it_has_changed(model, change):
    known = model_info(model)
    assert model_info(model) is known
    change(model)
    assert model_info(model) is not known
    assert model_info(model) is model_info(model)


def test_what_has_changed_counts(model):
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
def test_configurations_and_classes_may_hold_what_cannot_be_compared_or_written(model, make, monkeypatch):
    call = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(**call)
    with tr.accelerated(model):
        for holder in (model.config, type(model)):
            for _ in range(2):
                monkeypatch.setattr(holder, "extra", make(), raising=False)
                assert torch.equal(model.generate(**call), expected)
                assert model.acceleration.fallback is None
        known = facts_of(model)
    assert facts_of(model) is known
    named = weights_fingerprint(model)
    model.config.extra = None
    assert weights_fingerprint(model) != named


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(3), lambda: torch.nn.Parameter(torch.ones(3)), torch.nn.Identity, lambda: lambda: 1]
)
def test_an_object_that_is_gone_is_no_later_one(make):
    """Which may be given its number, and its memory."""
    one, other = make(), make()
    before, later = (Identities([one, other]).watch() for _ in range(2))
    assert before == later
    del other
    assert before != later
