"""Only on a card: forward passes are captured, replayed without synchronization, and their memory is freed."""

import gc

import pytest
import torch
from support import tiny
from support.on_device import CAPTURED, medium

import token_recycling as tr
from token_recycling.model.graphs.passes import Shape
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.target import Target
from token_recycling.trees.packed import send

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


def test_pass_never_synchronizes_with_the_device(model):
    target = Target(model.cuda())
    passes, tree = passes_or_reason(target), tr.Template.from_paths([(0,), (1,), (0, 0)])
    trees = send([tr.Draft(torch.arange(len(tree)), tree.parents)], [0], 8, target.device)
    with torch.no_grad():
        passes.begin(target, target.new_cache(), [0], 64)
        for mode in ("default", "error"):  # the first run loads and compiles kernels
            torch.cuda.set_sync_debug_mode(mode)
            try:
                passes._pass(target, Shape(1, 8, 1024), trees)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_memory_is_constant_across_calls_and_freed_at_the_end():
    device = torch.device("cuda")
    model, ids = medium(device, torch.bfloat16), tiny.prompt(0, 100, 1024).cuda()
    before = torch.cuda.memory_allocated()
    tr.accelerate(model, "recycling", fast=True)
    allocated = []
    for _ in range(6):
        model.generate(ids, max_new_tokens=100, do_sample=False)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    assert CAPTURED in model.acceleration.stats.path
    assert allocated[-1] <= allocated[2] * 1.05
    tr.decelerate(model)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < before
