"""On a card alone: steps are captured, replayed without waiting, and their memory is given back."""

from __future__ import annotations

import gc

import pytest
import torch
from support import tiny
from support.on_device import CAPTURED, medium

import token_recycling as tr
from token_recycling.cuda_graphs.runner import StepRunner
from token_recycling.cuda_graphs.step import Choice, StepPlan
from token_recycling.cuda_graphs.support import runner_or_reason
from token_recycling.model.tree_model import TreeModel

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BAND = 256


@pytest.mark.parametrize("drafter", ["published:tree=static:12", "recycling:tree=12", "plain"])
def test_it_is_the_way_that_is_taken_by_itself(model, drafter):
    ids = tiny.prompt(0, 9).cuda()
    wanted = model.cuda().generate(ids, max_new_tokens=60, do_sample=False)
    tr.accelerate(model, drafter)
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=60, do_sample=False), wanted)
        assert CAPTURED in model.acceleration.stats.path


def test_cuda_itself_finds_no_wait_in_a_step(model):
    target = TreeModel(model.cuda())
    steps = runner_or_reason(target)
    assert isinstance(steps, StepRunner)
    cache = target.new_cache()
    with torch.no_grad():
        steps.begin(cache, 64)
        source, plan = steps.host_source(8), StepPlan(8, 8, BAND, 8, True, False)
        steps.rehearse(target, plan, source, Choice())
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.rehearse(target, plan, source, Choice())
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_memory_is_flat_over_texts_and_given_back_at_the_end():
    device = torch.device("cuda")
    model, ids = medium(device, torch.bfloat16), tiny.prompt(0, 100, 1024).cuda()
    before = torch.cuda.memory_allocated()
    tr.accelerate(model, "recycling")
    held = []
    for _ in range(6):
        model.generate(ids, max_new_tokens=100, do_sample=False)
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert CAPTURED in model.acceleration.stats.path
    assert held[-1] <= held[2] * 1.05
    tr.decelerate(model)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < before
