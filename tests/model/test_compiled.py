"""Output of models compiled with torch.compile. The backend `eager` traces like others, but generates no code."""

import pytest
import torch
from support import tiny
from torch._dynamo.utils import counters

import token_recycling as tr

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("nothing_compiled")]


def compile_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compile_in_place(model):
    model.compile(backend="eager")


@pytest.mark.parametrize("compile_model", [compile_in_place, compile_forward])
def test_compiled_model_gives_the_same_output_without_its_graphs(compile_model, caplog):
    plain, model = tiny.llama(), tiny.llama()
    tr.accelerate(model, tree=6)
    compile_model(model)
    for seed in range(3):
        ids = tiny.prompt(seed, 6 + seed)
        wanted = plain.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)
        assert model.acceleration.fallback is None
    assert not counters["stats"]["unique_graphs"]
    warning = "LlamaForCausalLM is compiled: torch.compile graphs are bypassed"
    assert sum(warning in record.message for record in caplog.records) == 1
    tr.decelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)
    assert counters["stats"]["unique_graphs"]


def test_partly_compiled_model_gives_the_same_output_with_few_graphs():
    plain, model = tiny.llama(), tiny.llama()
    model.model = torch.compile(model.model, backend="eager")
    tr.accelerate(model, tree=6)
    for seed in range(3):
        ids = tiny.prompt(seed, 6 + seed)
        wanted = plain.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False), wanted)
    assert 1 <= counters["stats"]["unique_graphs"] <= 6


def test_compiled_wrapper_uses_its_accelerated_model(model):
    wanted, wrapper = model.generate(tiny.prompt(0, 6), max_new_tokens=12), torch.compile(model, backend="eager")
    with pytest.raises(
        tr.UnsupportedModelError, match=r"OptimizedModule .*; pass the LlamaForCausalLM in its \._orig_mod"
    ):
        tr.accelerate(wrapper)
    tr.accelerate(wrapper._orig_mod)
    assert torch.equal(wrapper.generate(tiny.prompt(0, 6), max_new_tokens=12), wanted)
    assert model.acceleration.stats.steps


def test_a_compiled_function_may_call_generate(model):
    ids = tiny.prompt(0, 6)
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
    tr.accelerate(model)
    compiled = torch.compile(lambda ids: model.generate(ids, max_new_tokens=12, do_sample=False), backend="eager")
    assert torch.equal(compiled(ids), wanted)
    assert model.acceleration.stats.steps
