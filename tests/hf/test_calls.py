"""What a call leaves: notes of itself alone, whatever else is called meanwhile and for every way past our loop, and
beside them a model as it was, however the call ends.
"""

from __future__ import annotations

import gc
import inspect
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import tiny
from support.cases import paired
from transformers import LlamaForCausalLM, StoppingCriteriaList

import token_recycling as tr

pytestmark = pytest.mark.core

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
IDS = tiny.prompt(0, 6)


def meanwhile(other, thread):
    """A criterion that ends nothing, and lets something else happen once, from beginning to end. It reaches the thread
    but not the model, or the call would be left to `generate`.
    """
    waiting = [threading.Thread(target=other)]

    def criterion(input_ids, scores, **more):
        if waiting:
            happening = waiting.pop()
            if thread:
                happening.start()
                happening.join()
            else:
                happening.run()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    return StoppingCriteriaList([criterion])


OTHERS: dict[str, dict[str, Any]] = {
    "accelerated": {"max_new_tokens": 5, "do_sample": False},
    "left to transformers": {"use_cache": False, **GREEDY},
}


@pytest.mark.parametrize(("name", "thread"), paired(OTHERS, [True, False]))
def test_a_call_is_noted_by_itself(model, name, thread):
    """Whatever is called in between, by another thread or in this one."""
    wanted = model.generate(IDS, **GREEDY)
    tr.accelerate(model, "plain")
    noted = []

    def between():
        model.generate(IDS, **OTHERS[name])
        noted.append((model.acceleration.stats.tokens, model.acceleration.fallback))

    ours = model.generate(IDS, stopping_criteria=meanwhile(between, thread), return_dict_in_generate=True, **GREEDY)
    accelerated = name == "accelerated"
    assert torch.equal(ours.sequences, wanted)
    assert ours.stats.tokens == 12
    assert model.acceleration.stats is ours.stats
    assert model.acceleration.fallback is None
    assert model.acceleration.total.tokens == 12 + 5 * accelerated
    assert noted[0][0] == 5 * accelerated
    assert (noted[0][1] is None) == accelerated


def test_a_call_that_transformers_decodes_in_another_way_leaves_no_notes(model):
    plain = model.generate(IDS, num_beams=2, **GREEDY)
    tr.accelerate(model, "plain").generate(IDS, **GREEDY)
    stats = model.acceleration.stats
    assert torch.equal(model.generate(IDS, num_beams=2, **GREEDY), plain)
    assert model.acceleration.stats is stats


@pytest.mark.parametrize("way", [tr.accelerate, lambda model: tr.accelerate(tr.accelerate(model), "suffix")])
def test_generate_says_what_it_takes_and_does_as_before(model, way):
    names = "generate", "prepare_inputs_for_generation", "forward"
    before = [(inspect.signature(getattr(model, name)), getattr(model, name).__doc__) for name in names]
    way(model)
    assert before == [(inspect.signature(getattr(model, name)), getattr(model, name).__doc__) for name in names]
    assert inspect.unwrap(type(model).generate) is inspect.unwrap(LlamaForCausalLM.generate)


# A model as it was


@contextmanager
def left_alone(model):
    """Within the block nothing about the object may change: its class, its attributes, what is registered in it, and
    what its acceleration says.
    """
    kind, attributes, notes = type(model), dict(vars(model)), said_of(model)
    contents = {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    yield
    assert type(model) is kind
    assert list(vars(model)) == list(attributes)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert all(vars(model)[name] == value for name, value in contents.items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)
    assert said_of(model) == notes


def said_of(model):
    """The notes of an accelerated model, and what its drafter has learned."""
    own = getattr(model, "acceleration", None)
    if own is None:
        return None
    return id(own.stats), own.stats.as_dict(), own.total.as_dict(), own.fallback, own.drafter.matrix.candidates.tolist()


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


ENDS: dict[str, tuple[dict[str, Any], type[Exception] | None]] = {
    "sampled": ({"do_sample": True}, None),
    "fast": ({"fast": True}, None),
    "a batch": ({"inputs": IDS.expand(3, -1)}, None),
    "a static cache": ({"cache_implementation": "static"}, None),
    "left to transformers": ({"num_beams": 2}, None),
    "returned as a dictionary": ({"return_dict_in_generate": True, "output_scores": True}, None),
    "an unknown drafter": ({"drafter": "nonsense"}, ValueError),
    "a drafter's options": ({"drafter": "recycling:tree=nonsense"}, ValueError),
    "an argument that generate does not know": ({"nonsense": 3}, ValueError),
    "fast steps that do not hold": ({"fast": True, "reproducible": True}, tr.NoFastPathError),
    "a streamer": ({"streamer": Interrupting}, Interrupted),
    "a processor": ({"logits_processor": [interrupting]}, Interrupted),
    "a criterion": ({"stopping_criteria": StoppingCriteriaList([interrupting])}, Interrupted),
}


@pytest.mark.parametrize(("end", "accelerated"), paired(ENDS, [False, True]))
def test_a_call_leaves_the_model_as_it_was_however_it_ends(model, end, accelerated):
    arguments, error = ENDS[end]
    arguments = {name: value() if value is Interrupting else value for name, value in arguments.items()}
    wanted = model.generate(IDS, **GREEDY)
    if accelerated:
        tr.accelerate(model, "published", tree="paper").generate(tiny.prompt(1, 9), **GREEDY)
    with left_alone(model):
        if error is None:
            tr.generate(model, **{"inputs": IDS, **GREEDY, **arguments})
        else:
            with pytest.raises(error):
                tr.generate(model, IDS, **GREEDY, **arguments)
    assert torch.equal(model.generate(IDS, **GREEDY), wanted)


# Calls that end early


def by_streamer(model):
    tr.generate(model, IDS, drafter="plain", fast=True, streamer=Interrupting(), **GREEDY)


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


def by_leaving_a_stream(model):
    steps = tr.stream(model, IDS, "plain", fast=True, max_new_tokens=20)
    next(steps)
    with pytest.raises(tr.NoFastPathError, match="another call"):
        tr.generate(model, IDS, fast=True, **GREEDY)
    steps.throw(Interrupted)


@pytest.mark.parametrize("end", [by_streamer, by_the_models_forward, by_leaving_a_stream])
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
