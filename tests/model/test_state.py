"""A model's state changes exactly when the operations of its forward pass do."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import tiny
from support.adapters import adapted
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations

import token_recycling as tr
from token_recycling.model.state import state_of
from token_recycling.model.target import Target

Change = Callable[[Any], Any]


def state(model):
    return state_of(Target(model), keep=True)


def swap_weights(model):
    """Exchange two weights of the model."""
    one, other = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    one.q_proj.weight, other.q_proj.weight = other.q_proj.weight, one.q_proj.weight


CHANGES: dict[str, Change] = {
    "attribute": lambda model: setattr(model.model.norm, "variance_epsilon", 0.5),
    "list": lambda model: model.lm_head.active.append("b"),
    "number of another type": lambda model: model.lm_head.scaling.update(a=3),
    "mode": lambda model: model.model.layers[1].mlp.train(),
    "nested option": lambda model: model.config.rope_parameters.update(rope_theta=5.0),
    "function": lambda model: setattr(model.model.norm, "forward", lambda states: states),
    "hook": lambda model: model.model.norm.register_forward_hook(lambda *args: None),
    "weight": lambda model: setattr(model.lm_head.base, "weight", torch.nn.Parameter(torch.zeros(64, 32))),
    "weight moved": lambda model: setattr(model.lm_head.base.weight, "data", torch.zeros(64, 32)),
    "weights swapped": swap_weights,
    "weight of a module in a list": lambda model: setattr(model.lm_head.others[0].weight, "data", torch.zeros(2, 2)),
    "part": lambda model: setattr(model, "lm_head", model.lm_head.base),
    "parametrized": lambda model: parametrizations.weight_norm(model.lm_head.base),
    "compiled": lambda model: model.model.compile(backend="eager"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_relevant_change_alters_the_state(model, change):
    adapted(model).others = [torch.nn.Linear(2, 2)]
    before = state(model)
    assert before == state(model)
    change(model)
    assert before != state(model)
    assert state(model) == state(model)


@pytest.mark.parametrize(
    "nothing",
    [
        lambda model: model(tiny.prompt(0, 5)),
        lambda model: model.generate(tiny.prompt(0, 5), max_new_tokens=3),
        lambda model: tr.accelerate(model),
        lambda model: tr.generate(model, tiny.prompt(0, 5), fast=True, max_new_tokens=3),
        lambda model: model.load_state_dict(tiny.llama(1).state_dict()),
        lambda model: model.requires_grad_(False),
        lambda model: model.train().eval(),
        lambda model: setattr(model, "generation_config", tiny.llama().generation_config),
    ],
    ids=["pass", "generate", "accelerate", "fast", "values", "gradients", "train and eval", "generation options"],
)
def test_irrelevant_change_keeps_the_state(model, nothing):
    before = state(model)
    nothing(model)
    assert before == state(model)


OPTIONS: dict[str, tuple[Callable[..., Any], Any, Any]] = {
    "precision": (partial(setattr, torch.backends.cuda.matmul, "fp32_precision"), "tf32", "none"),
    "sums": (partial(setattr, torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"), False, True),
    "dtype": (torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": (torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize(("choose", "other", "usual"), OPTIONS.values(), ids=OPTIONS)
def test_options_of_torch_alter_the_state(model, choose, other, usual):
    before = state(model)
    try:
        choose(other)
        assert before != state(model)
    finally:
        choose(usual)
    assert before == state(model)


def test_attention_kernel_and_implementation_alter_the_state(model):
    before = state(model)
    with sdpa_kernel(SDPBackend.MATH):
        assert before != state(model)
    assert before == state(model)
    model.set_attn_implementation("eager")
    assert before != state(model)


def test_self_referencing_attributes(model):
    model.lm_head.parts = [1, [2]]
    model.lm_head.parts.append(model.lm_head.parts)
    before = state(model)
    assert before == state(model)
    model.lm_head.parts[1][0] = 3
    assert before != state(model)


def test_function_in_place_of_a_collected_one_alters_the_state(model, monkeypatch):
    """Python reuses the id of a collected function; also for a method of a class."""
    for scale in range(5):
        model.model.norm.forward = lambda states, scale=scale: states * scale
        before = state(model)
        del model.model.norm.forward
        model.model.norm.forward = lambda states, scale=scale: states * scale + 1
        assert before != state(model)
    before = state(model)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda norm, states: states)
    assert before != state(model)


def test_state_keeps_nothing_alive():
    model = tiny.llama()
    head = adapted(model)
    head.act = lambda states: states
    head.others = [torch.zeros(2), {"part": torch.nn.Linear(2, 2)}]
    gone = [weakref.ref(one) for one in (model, head, head.base.weight, head.act, head.others[0], model.config)]
    before = state(model)
    del model, head
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)
    assert before != state(tiny.llama())
