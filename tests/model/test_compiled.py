"""Models compiled with torch.compile say the same. The backend `eager` traces as others do, and generates no code."""

import pytest
import torch
from support import tiny
from torch._dynamo.utils import counters

import token_recycling as tr

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("nothing_compiled")]


def forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def in_place(model):
    model.compile(backend="eager")


def inner(model):
    model.model = torch.compile(model.model, backend="eager")


@pytest.mark.parametrize("compiled", [in_place, forward])
def test_a_compiled_model_says_the_same_without_its_graphs(compiled, caplog):
    plain, model = tiny.llama(), tiny.llama()
    tr.accelerate(model, tree=6)
    compiled(model)
    for seed in range(3):
        ids = tiny.prompt(seed, 6 + seed)
        wanted = plain.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)
        assert model.acceleration.fallback is None
    assert not counters["stats"]["unique_graphs"]
    said = "LlamaForCausalLM is compiled: torch.compile graphs are bypassed"
    assert sum(said in record.message for record in caplog.records) == 1
    tr.decelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)
    assert counters["stats"]["unique_graphs"]


def test_a_model_with_a_compiled_part_says_the_same_in_few_graphs():
    plain, model = tiny.llama(), tiny.llama()
    inner(model)
    tr.accelerate(model, tree=6)
    for seed in range(3):
        ids = tiny.prompt(seed, 6 + seed)
        wanted = plain.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)
    assert 1 <= counters["stats"]["unique_graphs"] <= 6


def test_the_wrapper_of_a_compiled_model_follows_the_model_in_it(model):
    wanted, wrapper = model.generate(tiny.prompt(0, 6), max_new_tokens=12), torch.compile(model, backend="eager")
    with pytest.raises(
        tr.UnsupportedModelError, match=r"OptimizedModule .*; pass the LlamaForCausalLM in its \._orig_mod"
    ):
        tr.accelerate(wrapper)
    tr.accelerate(wrapper._orig_mod)
    assert torch.equal(wrapper.generate(tiny.prompt(0, 6), max_new_tokens=12), wanted)
    assert model.acceleration.stats.steps
