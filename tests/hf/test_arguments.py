"""What callers pass: options of drafters beside arguments of our own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny
from transformers import LlamaForCausalLM

import token_recycling as tr
from token_recycling.registry import drafter_class, options_of

IDS = tiny.prompt(0, 6)
DRAFTED: dict[str, Any] = {"drafter": "draft_model", "mode": "sequence", "depth": 3}


def by_accelerate(model: LlamaForCausalLM, /, **options: Any) -> torch.Tensor:
    return tr.accelerate(model, **options).generate(IDS, max_new_tokens=10, do_sample=False)


def by_accelerated(model: LlamaForCausalLM, /, **options: Any) -> torch.Tensor:
    with tr.accelerated(model, **options):
        return model.generate(IDS, max_new_tokens=10, do_sample=False)


def by_stream(model: LlamaForCausalLM, /, **options: Any) -> torch.Tensor:
    steps = tr.stream(model, input_ids=IDS, max_new_tokens=10, **options)
    return torch.tensor([IDS[0].tolist() + [token for step in steps for token in step.tokens]])


def by_custom_generate(model: LlamaForCausalLM, /, **options: Any) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=10, do_sample=False, custom_generate=tr.custom_generate(**options))


@pytest.mark.parametrize("way", [by_accelerate, by_accelerated, by_stream, by_custom_generate])
def test_a_drafter_may_have_an_option_named_model(model: LlamaForCausalLM, way: Callable[..., torch.Tensor]) -> None:
    wanted = model.generate(IDS, max_new_tokens=10, do_sample=False)
    assert torch.equal(way(model, model=tiny.related(model), **DRAFTED), wanted)


@pytest.mark.parametrize(
    "function", [tr.accelerate, tr.accelerated, tr.stream, tr.custom_generate, tr.make_drafter, tr.generate]
)
def test_no_option_of_a_drafter_is_an_argument_of_ours(function: Callable[..., Any]) -> None:
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ours = {name for name, given in inspect.signature(function).parameters.items() if given.kind in kinds}
    for name in tr.drafter_names():
        assert not ours & options_of(drafter_class(name)).keys()
