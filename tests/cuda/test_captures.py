"""On a card alone: steps are captured, replayed without waiting, and their memory is given back."""

import gc

import pytest
import torch
from support import tiny
from support.on_device import CAPTURED, medium

import token_recycling as tr
from token_recycling.cuda_graphs import runner_of
from token_recycling.cuda_graphs.step import Choice, StepPlan
from token_recycling.model.tree_model import TreeModel

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

BAND = 256


def test_cuda_itself_finds_no_wait_in_a_step(model):
    target = TreeModel(model.cuda())
    steps, cache = runner_of(target), target.new_cache()
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
    tr.accelerate(model, "recycling", fast=True)
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
