"""What is known about a model is found once, and again as soon as it is another one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from token_recycling.model.info import model_info


class Adapter(torch.nn.Linear):
    """Another kind of part."""


def adapted(model):
    model.lm_head.__class__ = Adapter


class Weight(torch.nn.Parameter):
    """Another kind of weight."""


def other_weight(model):
    model.lm_head.weight = Weight(model.lm_head.weight.detach())


def scaled(model):
    """Within a value of the configuration."""
    model.config.rope_parameters["factor"] = 2.0


CHANGES: list[Callable[[LlamaForCausalLM], Any]] = [
    adapted,
    other_weight,
    scaled,
    lambda model: model.set_attn_implementation("eager"),
    lambda model: setattr(model.config, "sliding_window", 8),
    lambda model: setattr(model, "is_quantized", True),
    lambda model: model.add_module("more", torch.nn.Identity()),
]


@pytest.mark.parametrize("change", CHANGES)
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
