"""What callers pass: options of drafters beside arguments of our own."""

from __future__ import annotations

import copy
import inspect
import logging
from typing import Any

import pytest
import torch
from support import tiny
from transformers import LlamaForCausalLM
from transformers.generation.stopping_criteria import MaxLengthCriteria

import token_recycling as tr
from token_recycling._util.options import options_of
from token_recycling.drafters._registry import drafter_class

IDS = tiny.prompt(0, 6)
DRAFTED: dict[str, Any] = {"drafter": "draft_model", "mode": "sequence", "depth": 3}


def by_accelerate(model, /, **options):
    return tr.accelerate(model, **options).generate(IDS, max_new_tokens=10, do_sample=False)


def by_accelerated(model, /, **options):
    with tr.accelerated(model, **options):
        return model.generate(IDS, max_new_tokens=10, do_sample=False)


def by_stream(model, /, **options):
    steps = tr.stream(model, input_ids=IDS, max_new_tokens=10, **options)
    return torch.tensor([IDS[0].tolist() + [token for step in steps for token in step.tokens]])


def by_custom_generate(model, /, **options):
    return model.generate(IDS, max_new_tokens=10, do_sample=False, custom_generate=tr.custom_generate(**options))


@pytest.mark.parametrize("way", [by_accelerate, by_accelerated, by_stream, by_custom_generate])
def test_a_drafter_may_have_an_option_named_model(model, way):
    wanted = model.generate(IDS, max_new_tokens=10, do_sample=False)
    assert torch.equal(way(model, model=tiny.related(model), **DRAFTED), wanted)


@pytest.mark.parametrize(
    "function", [tr.accelerate, tr.accelerated, tr.stream, tr.custom_generate, tr.make_drafter, tr.generate]
)
def test_no_option_of_a_drafter_is_an_argument_of_ours(function):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ours = {name for name, given in inspect.signature(function).parameters.items() if given.kind in kinds}
    for name in tr.drafter_names():
        assert not ours & options_of(drafter_class(name)).keys()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input_ids": [3, 4]}, TypeError, "input_ids .*, got list"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens .*, got 0"),
        ({"max_new_tokens": 2.5}, ValueError, "max_new_tokens .*, got 2.5"),
        ({"max_new_tokens": "5"}, ValueError, "max_new_tokens .*, got '5'"),
        ({"max_new_tokens": None}, ValueError, "max_new_tokens .*, got None"),
    ],
)
def test_a_stream_says_what_it_expected(model, arguments, error, message):
    with pytest.raises(error, match=message):
        tr.stream(model, **{"input_ids": IDS, **arguments})


def test_a_stream_takes_processors_and_criteria_in_a_list(model):
    """As `generate` does."""
    given = {"logits_processor": [lambda ids, scores: -scores], "stopping_criteria": [MaxLengthCriteria(12)]}
    wanted = model.generate(IDS, do_sample=False, max_new_tokens=20, **given)
    steps = tr.stream(model, IDS, max_new_tokens=20, **given)
    assert IDS[0].tolist() + [token for step in steps for token in step.tokens] == wanted[0].tolist()


@pytest.mark.parametrize("within", [tr.decelerate, lambda model: tr.accelerate(model, "suffix")])
@pytest.mark.parametrize("before", [tr.decelerate, tr.accelerate])
def test_after_a_with_block_the_model_is_as_it_was_whatever_was_done_in_it(model, before, within):
    kind, acceleration = type(before(model)), getattr(model, "acceleration", None)
    with tr.accelerated(model, "plain"):
        within(model)
    assert type(model) is kind
    assert getattr(model, "acceleration", None) is acceleration


class Repeating(LlamaForCausalLM):
    """Has a `generate` of its own, which comes to transformers' in the end."""

    def generate(self, inputs, *, times=1, **arguments):
        return super().generate(inputs.repeat(1, times), **arguments)


def test_a_models_own_generate_is_called(model):
    wanted = model.generate(IDS.repeat(1, 2), max_new_tokens=5, do_sample=False)
    model.__class__ = Repeating
    assert torch.equal(tr.accelerate(model).generate(IDS, times=2, max_new_tokens=5, do_sample=False), wanted)
    assert model.acceleration.fallback is None
    assert type(tr.decelerate(model)) is Repeating


@pytest.mark.parametrize("accelerate", [tr.accelerate, tr.generate])
def test_a_generate_set_on_the_model_itself_is_noted(model, caplog, accelerate):
    """Such as that of a repository's custom_generate: it is called in place of the accelerated one."""
    model.generate = lambda inputs=None, **arguments: inputs
    with caplog.at_level(logging.WARNING, "token_recycling"):
        accelerate(model, *([] if accelerate is tr.accelerate else [IDS]))
    assert "a generate() of its own" in caplog.text
    assert torch.equal(model.generate(IDS), IDS)


def test_a_copy_that_shares_all_may_be_decelerated_by_itself(model):
    other = copy.copy(tr.accelerate(model))
    assert type(tr.decelerate(other)) is LlamaForCausalLM
    model.generate(IDS, max_new_tokens=5)
    assert model.acceleration.stats.tokens == 5
