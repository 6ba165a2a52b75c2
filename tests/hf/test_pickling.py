"""An accelerated model is pickled and copied with what its drafter has learned, and comes back accelerated."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from support import tiny
from support.drafters import NAMES, example
from transformers import LlamaForCausalLM

import token_recycling as tr

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
IDS = tiny.prompt(0, 6)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def pickled_by_the_oldest_protocol(model):
    return pickle.loads(pickle.dumps(model, protocol=0))


def saved_by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [pickled, pickled_by_the_oldest_protocol, saved_by_torch, copy.deepcopy])
def test_a_model_comes_back_with_what_was_learned(model, way):
    tr.accelerate(model, "published", tree="paper").generate(IDS, **GREEDY)
    twin = way(model)
    assert type(twin) is type(model)
    ours, own = twin.acceleration, model.acceleration
    assert torch.equal(ours.drafter.matrix.candidates, own.drafter.matrix.candidates)
    assert ours.drafter is not own.drafter
    assert ours.total.as_dict() == own.total.as_dict()
    assert torch.equal(twin.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
    assert ours.stats.steps == own.stats.steps < 12
    assert type(tr.decelerate(twin)) is LlamaForCausalLM
    assert hasattr(model, "acceleration")


@pytest.mark.parametrize("way", [pickled, copy.deepcopy])
@pytest.mark.parametrize("name", NAMES)
def test_every_drafter_may_be_pickled_and_copied(model, name, way, tmp_path):
    """Before its first text and after it."""
    wanted = model.generate(IDS, **GREEDY)
    model = way(tr.accelerate(model, example(name, model, tmp_path)))
    for _ in range(2):
        assert torch.equal(model.generate(IDS, **GREEDY), wanted)
        assert model.acceleration.fallback is None
        assert model.acceleration.stats.drafter.startswith(name)
        model = way(model)


def test_another_process_decodes_with_it(model):
    """One that is started anew: it has made no accelerated class yet."""
    wanted = tr.accelerate(model, "published", tree="paper").generate(IDS, **GREEDY)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ours = pool.apply(model.generate, (IDS,), {**GREEDY, "return_dict_in_generate": True})
    assert torch.equal(ours.sequences, wanted)
    assert 0 < ours.stats.steps < 12
