"""Side effects of a call: it records its own statistics and fallback, whatever other calls run meanwhile, and leaves
the model otherwise unchanged, however the call ends.
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
    """Return a criterion that never stops and runs `other` once, from beginning to end. It references the thread but
    not the model; otherwise the call would fall back to `generate`.
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
    "falling back": {"use_cache": False, **GREEDY},
}


@pytest.mark.parametrize(("name", "thread"), paired(OTHERS, [True, False]))
@pytest.mark.falls_back
def test_call_records_only_its_own_statistics(model, name, thread, caplog):
    """Another call runs in between, in another thread or in this one. A reason is logged once."""
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
    between()
    assert sum("not accelerated" in record.message for record in caplog.records) == (not accelerated)


def test_beam_search_records_no_statistics(model):
    plain = model.generate(IDS, num_beams=2, **GREEDY)
    tr.accelerate(model, "plain").generate(IDS, **GREEDY)
    stats = model.acceleration.stats
    assert torch.equal(model.generate(IDS, num_beams=2, **GREEDY), plain)
    assert model.acceleration.stats is stats


@pytest.mark.parametrize("way", [tr.accelerate, lambda model: tr.accelerate(tr.accelerate(model), "suffix")])
def test_accelerate_keeps_signatures_and_docstrings(model, way):
    names = "generate", "prepare_inputs_for_generation", "forward"
    before = [(inspect.signature(getattr(model, name)), getattr(model, name).__doc__) for name in names]
    way(model)
    assert before == [(inspect.signature(getattr(model, name)), getattr(model, name).__doc__) for name in names]
    assert inspect.unwrap(type(model).generate) is inspect.unwrap(LlamaForCausalLM.generate)


# Calls leave the model unchanged


SET_BY_GENERATE = {"_previous_max_cache_length", "_cache"}
"""Attributes that transformers' own `generate` sets on a model, the second one in older releases."""


@contextmanager
def unchanged(model):
    """Assert that the block does not change the model: its class, attributes and registered objects, and the records of
    its acceleration.
    """
    kind, attributes, notes = type(model), dict(vars(model)), records_of(model)
    contents = {name: dict(value) for name, value in attributes.items() if isinstance(value, dict)}
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    yield
    assert type(model) is kind
    assert [name for name in vars(model) if name not in SET_BY_GENERATE] == list(attributes)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert all(vars(model)[name] == value for name, value in contents.items())
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)
    assert records_of(model) == notes


def records_of(model):
    """Return the statistics and fallback of an accelerated model, and the candidates that its drafter has learned."""
    own = getattr(model, "acceleration", None)
    if own is None:
        return None
    return id(own.stats), own.stats.as_dict(), own.total.as_dict(), own.fallback, own.drafter.matrix.candidates.tolist()


class Interrupted(Exception):  # noqa: N818
    """An error of the caller's code."""


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
    "falling back": ({"num_beams": 2}, None),
    "returned as a dictionary": ({"return_dict_in_generate": True, "output_scores": True}, None),
    "an unknown drafter": ({"drafter": "nonsense"}, ValueError),
    "a drafter's options": ({"drafter": "recycling:tree=nonsense"}, ValueError),
    "an unknown argument": ({"nonsense": 3}, ValueError),
    "fast and reproducible": ({"fast": True, "reproducible": True}, tr.NoFastPathError),
    "a streamer": ({"streamer": Interrupting}, Interrupted),
    "a processor": ({"logits_processor": [interrupting]}, Interrupted),
    "a criterion": ({"stopping_criteria": StoppingCriteriaList([interrupting])}, Interrupted),
}


@pytest.mark.parametrize(("end", "accelerated"), paired(ENDS, [False, True]))
def test_call_leaves_the_model_unchanged_however_it_ends(model, end, accelerated):
    arguments, error = ENDS[end]
    arguments = {name: value() if value is Interrupting else value for name, value in arguments.items()}
    wanted = model.generate(IDS, **GREEDY)
    if accelerated:
        tr.accelerate(model, "published", tree="paper").generate(tiny.prompt(1, 9), **GREEDY)
    with unchanged(model):
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
    """Register the hook within the sequence: a call that begins with a hook in the model is rejected."""
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
def test_fast_call_works_right_after_a_failed_one(model, end):
    """While the traceback of the failed call is held, and without garbage collection."""
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
