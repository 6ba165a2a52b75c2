"""What is kept from text to text can be written within torch's inference mode and outside, wherever it was made."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.recorded import RecordedGraphs

import token_recycling as tr


@pytest.mark.parametrize("recorded", [False, True], ids=["run", "replayed"])
@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)], ids=["within first", "outside first"])
@pytest.mark.parametrize("drafter", ["published:tree=static:8", "prompt_lookup"])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_texts_within_inference_mode_and_outside(model, recorded, order, drafter, do_sample, monkeypatch):
    if recorded:
        monkeypatch.setattr("token_recycling.cuda_graphs.runner.Graphs", RecordedGraphs)
    texts = []
    arguments = {"max_new_tokens": 24, "do_sample": do_sample}
    wanted = model.generate(tiny.prompt(0, 6), max_new_tokens=24, do_sample=False)
    for within in order:
        with torch.inference_mode(within):
            if not texts:
                tr.accelerate(model, drafter, fast=True)
            texts.append(tiny.seeded(model.generate, tiny.prompt(0, 6), **arguments)[0].tolist())
            assert model.acceleration.stats.path.startswith("fast")
    assert texts[0] == texts[1] == texts[2]
    assert do_sample or texts[0] == wanted.tolist()


def test_room_grows_in_the_other_mode(model):
    tr.accelerate(model, "prompt_lookup", fast=True)
    with torch.inference_mode():
        model.generate(tiny.prompt(0, 6), max_new_tokens=4)
    wanted = tiny.llama().generate(tiny.prompt(0, 300), max_new_tokens=8, do_sample=False)
    for within in (False, True):
        with torch.inference_mode(within):
            assert torch.equal(model.generate(tiny.prompt(0, 300), max_new_tokens=8, do_sample=False), wanted)
