"""`tr.generate()` leaves the model as it was, however the call ends, and calls that end early are in nobody's way."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import tiny
from transformers import (
    StoppingCriteriaList,
)

import token_recycling as tr

GREEDY: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
IDS = tiny.prompt(0, 6)


@contextmanager
def left_alone(model):
    """Within the block nothing about the object may change: its class, its attributes and what is registered in it."""
    kind, attributes = type(model), dict(vars(model))
    contents = {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    yield
    assert type(model) is kind
    assert list(vars(model)) == list(attributes)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert all(vars(model)[name] == value for name, value in contents.items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)


class Interrupted(Exception):  # noqa: N818
    """A caller's own error."""


class Interrupting:
    """A streamer that fails after some puts."""

    def __init__(self, after=2):
        self.left = after

    def put(self, value):
        if not self.left:
            raise Interrupted
        self.left -= 1

    def end(self):
        pass


def interrupting(input_ids, scores):
    """A processor, or a criterion, that fails after some tokens."""
    if input_ids.shape[1] > IDS.shape[1] + 5:
        raise Interrupted
    return scores if isinstance(scores, torch.Tensor) else torch.zeros(len(input_ids), dtype=torch.bool)


FAILURES: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "an unknown drafter": ({"drafter": "nonsense"}, ValueError),
    "a drafter's options": ({"drafter": "recycling:tree=nonsense"}, ValueError),
    "an argument that generate does not know": ({"nonsense": 3}, ValueError),
    "fast steps that do not hold": ({"fast": True, "no_repeat_ngram_size": 2}, tr.NoFastPathError),
    "a streamer": ({"streamer": Interrupting}, Interrupted),
    "a processor": ({"logits_processor": [interrupting]}, Interrupted),
    "a criterion": ({"stopping_criteria": StoppingCriteriaList([interrupting])}, Interrupted),
}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "fast": {"fast": True},
    "a batch": {"inputs": IDS.expand(3, -1)},
    "a static cache": {"cache_implementation": "static"},
    "left to transformers": {"num_beams": 2},
    "returned as a dictionary": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.fixture(params=["plain", "accelerated"])
def either(request, model):
    """A model, accelerated or not."""
    if request.param == "accelerated":
        tr.accelerate(model, "published", tree="paper").generate(IDS, max_new_tokens=4)
    return model


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS.keys())
def test_a_call_leaves_the_model_as_it_was(either, arguments):
    given = {"inputs": IDS, **GREEDY, **arguments}
    with left_alone(either):
        tr.generate(either, **given)


@pytest.mark.parametrize(("arguments", "error"), FAILURES.values(), ids=FAILURES.keys())
def test_a_call_that_fails_leaves_the_model_as_it_was(either, arguments, error):
    arguments = {name: value() if value is Interrupting else value for name, value in arguments.items()}
    with left_alone(either), pytest.raises(error):
        tr.generate(either, IDS, **GREEDY, **arguments)


def test_a_call_is_none_of_an_accelerated_models_own(model):
    """Its statistics, its total, its drafter and what is said of its last call are not touched."""
    wanted = model.generate(IDS, **GREEDY)
    tr.accelerate(model, "published", tree="paper").generate(tiny.prompt(1, 9), **GREEDY)
    own = model.acceleration
    before = (own.stats, own.stats.as_dict(), own.total.as_dict(), own.fallback, own.drafter.matrix.candidates.clone())
    stats = tr.Stats()
    assert torch.equal(tr.generate(model, IDS, drafter="recycling", stats=stats, **GREEDY), wanted)
    tr.generate(model, IDS, num_beams=2, **GREEDY)
    with pytest.raises(Interrupted):
        tr.generate(model, IDS, streamer=Interrupting(), **GREEDY)
    assert stats.tokens == 20
    assert model.acceleration is own
    assert own.stats is before[0]
    assert (own.stats.as_dict(), own.total.as_dict(), own.fallback) == before[1:4]
    assert torch.equal(own.drafter.matrix.candidates, before[4])
    assert torch.equal(model.generate(IDS, **GREEDY), wanted)
    assert own.stats.drafter.startswith("published")


# Calls that end early


def by_streamer(model):
    tr.generate(model, IDS, drafter="plain", fast=True, streamer=Interrupting(), **GREEDY)


def by_streamer_of_an_accelerated_model(model):
    tr.accelerate(model, "plain", fast=True)
    try:
        model.generate(IDS, streamer=Interrupting(), **GREEDY)
    finally:
        tr.decelerate(model)


def by_criterion(model):
    criteria = StoppingCriteriaList([interrupting])
    tr.generate(model, IDS, drafter="plain", fast=True, stopping_criteria=criteria, **GREEDY)


def by_drafter(model):
    class Failing(tr.Drafter):
        def draft(self, context):
            if len(context.tokens) > 8:
                raise Interrupted
            return tr.make_drafter("plain").draft(context)

    tr.generate(model, IDS, drafter=Failing(), fast=True, **GREEDY)


def by_the_models_forward(model):
    """Within the text: a call that begins with a hook in the model is refused."""
    steps = tr.stream(model, IDS, "plain", fast=True, max_new_tokens=20)
    next(steps)

    def failing(*given):
        raise Interrupted

    hook = model.model.norm.register_forward_hook(failing)
    try:
        list(steps)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    "end", [by_streamer, by_streamer_of_an_accelerated_model, by_criterion, by_drafter, by_the_models_forward]
)
def test_the_next_fast_call_works_at_once(model, end):
    """While the traceback of the one that failed is held, and without a garbage collection."""
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(tr.generate(model, IDS, fast=True, **GREEDY), wanted)
    gc.disable()
    try:
        with pytest.raises(Interrupted) as held:
            end(model)
        for _ in range(2):
            assert torch.equal(tr.generate(model, IDS, fast=True, **GREEDY), wanted)
        assert held.tb is not None
    finally:
        gc.enable()


@pytest.mark.parametrize("leave", [lambda steps: steps.close(), lambda steps: steps.throw(Interrupted)])
def test_after_a_stream_is_left_the_next_fast_call_works_at_once(model, leave):
    wanted = model.generate(IDS, **GREEDY)
    steps = tr.stream(model, IDS, "plain", fast=True, max_new_tokens=20)
    next(steps)
    with pytest.raises(tr.NoFastPathError, match="another call"):
        tr.generate(model, IDS, fast=True, **GREEDY)
    try:
        leave(steps)
    except Interrupted as error:
        held = error
        assert held.__traceback__ is not None
    assert torch.equal(tr.generate(model, IDS, fast=True, **GREEDY), wanted)
