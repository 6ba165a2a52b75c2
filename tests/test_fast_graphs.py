"""A fast step is one graph without a break, and nothing in it makes the host wait; seen without an accelerator."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import architectures
import pytest
import tiny
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from transformers import LlamaForCausalLM
from transformers.generation import logits_process as warpers

import token_recycling as tr
from token_recycling.attention import attending
from token_recycling.drafting import Draft
from token_recycling.fast.sources import DeviceSource, HostSource
from token_recycling.fast.step import Choice, Plan, Verified, verify
from token_recycling.fast.steps import Steps
from token_recycling.fast.support import found
from token_recycling.fast.syncs import HostWaitsError, without_waiting
from token_recycling.target import Target

TREE = tr.Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
SAMPLED = Choice(
    (warpers.TemperatureLogitsWarper(0.8), warpers.TopKLogitsWarper(9), warpers.TopPLogitsWarper(0.9)), True
)
BAND = 256
GREEDY = Choice()


def step(model: Any, cache: Any, *arguments: Any) -> Verified:
    """A whole step in one function, as it is captured: also the move of the accepted slots."""
    verified = verify(model, cache, *arguments)
    cache.commit(verified.accepted.path, verified.accepted.number)
    return verified


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Ready:
    """A model with a text in its slots, and everything that a step is given."""

    def __init__(self, model: Any, device_drafts: bool = False, length: int = 12) -> None:
        self.target = Target(model)
        steps = found(self.target, "captured")
        assert isinstance(steps, Steps), steps
        self.steps = steps
        text = tiny.prompt(0, length + 1, 64)[0]
        cache = self.target.new_cache()
        self.target.prefill([text], cache)
        steps.begin(self.target, cache, length + 8)
        steps.root.copy_(text[-1:])
        steps.cache.shared.band = BAND
        self.source: HostSource | DeviceSource
        if device_drafts:
            drafter = tr.make_drafter("published", tree=TREE)
            drafter.start([text], self.target)
            retrieval = drafter.retrieval()
            assert retrieval is not None
            self.source = DeviceSource(retrieval, torch.device("cpu"))
            self.plan = Plan(len(TREE), TREE.depth + 1, BAND, 8, False, True)
        else:
            self.source = steps.host_source(8)
            self.source.send(Draft(TREE, torch.cat([text[-1:], torch.arange(1, len(TREE))])))
            self.plan = Plan(8, 8, BAND, 8, True, False)

    @torch.no_grad()
    def run(self, function: Callable[..., Any], choice: Choice = GREEDY) -> list[torch.Tensor]:
        """What a step gives, from the state in which the text was read; the slots are part of it."""
        state = [self.steps.cache.shared.length, self.steps.root, *self.source.state(), *self.steps.cache.stores]
        before = [tensor.clone() for tensor in state]
        target, steps = self.target, self.steps
        with attending(target.config, target.tree_attention):
            verified = function(
                target.model, steps.cache, target.support.layers, self.plan, self.source, choice, steps.root, steps.seed
            )
        after = [verified.report, verified.logits, *(tensor.clone() for tensor in state)]
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return after


def one_graph(ready: Ready, backend: str, choice: Choice = GREEDY) -> None:
    """The compiled step is one graph, and does what the step does."""
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    wanted = ready.run(step, choice)
    ours = ready.run(compiled, choice)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for own, theirs in zip(ours, wanted, strict=True):
        if own.dtype == torch.int32 and ready.plan.reports_candidates:  # ends with probabilities, as numbers of bits
            own, theirs = own[: -8 * 8], theirs[: -8 * 8]
        torch.testing.assert_close(own, theirs, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("device_drafts", [False, True], ids=["host drafts", "device drafts"])
@pytest.mark.parametrize("choice", [Choice(), SAMPLED], ids=["greedy", "sampled"])
def test_the_whole_step_is_one_graph(model: LlamaForCausalLM, device_drafts: bool, choice: Choice) -> None:
    one_graph(Ready(model, device_drafts), "eager", choice)


@pytest.mark.slow
@pytest.mark.parametrize("device_drafts", [False, True], ids=["host drafts", "device drafts"])
def test_it_is_one_graph_of_torchs_own_operations(model: LlamaForCausalLM, device_drafts: bool) -> None:
    one_graph(Ready(model, device_drafts), "aot_eager")


KINDS = """
mixtral gemma gpt2 gpt_neox gpt_bigcode opt stablelm cohere falcon gptj deepseek_v3 olmoe diffllama biogpt
mistral window of 8
gemma3n_text window of 8, shared keys and values
gpt_oss window of 8
cohere2 window of 8
"""
"""One of every way to embed positions, to attend, to share heads or experts; docs/LOG.md has the others."""
_names = [*KINDS.split("\n")[1].split(), *KINDS.strip().split("\n")[1:]]
FAST = [case for case in architectures.SUPPORTED if str(case) in _names]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST, ids=str)
def test_it_is_one_graph_with_families_of_every_kind(case: architectures.Case) -> None:
    one_graph(Ready(architectures.model_of(case)), "eager")


@pytest.mark.slow
def test_compiled_steps_give_the_text_and_copy_no_cache(model: LlamaForCausalLM) -> None:
    """A compiler that took the slots of the layers for one tensor would copy all of them in every layer."""
    ready = Ready(model, length=BAND - 100)
    ready.steps.reserve(BAND * 2)
    capacity = ready.steps.cache.capacity
    assert capacity > BAND
    compiled = torch.compile(verify, fullgraph=True, dynamic=False)
    _, (code, *_) = run_and_get_code(ready.run, compiled)
    made = re.findall(r"empty_strided\w*\((\([^)]*\))", code)
    assert made
    assert not [shape for shape in made if f" {capacity}," in shape]
    wanted = model.generate(tiny.prompt(1, 9), max_new_tokens=12, do_sample=False)
    tr.accelerate(model, "plain", fast="compiled")
    assert torch.equal(model.generate(tiny.prompt(1, 9), max_new_tokens=12, do_sample=False), wanted)
    assert model.acceleration.stats.path.startswith("fast: constant shapes, compiled")


@pytest.mark.slow
def test_flex_attention_gives_the_text() -> None:
    model = tiny.llama(num_hidden_layers=1, hidden_size=64, head_dim=16)
    ids = tiny.prompt(1, 9)
    wanted = model.generate(ids, max_new_tokens=30, do_sample=False)
    tree = tr.Tree.from_paths([(0,), (1,), (0, 0)])
    stats, text = tr.Stats(), []
    steps = tr.stream(model, ids, "published", tree=tree, fast="flex", stats=stats, max_new_tokens=60)
    while len(text) < 30:  # far from the end, where trees are cut to other shapes
        text += next(steps).tokens
    assert text[:30] == wanted[0, 9:].tolist()
    assert stats.mat > 1
    assert "flex_attention" in stats.path


def test_nothing_in_a_step_makes_the_host_wait(model: LlamaForCausalLM) -> None:
    for device_drafts in (False, True):
        for choice in (Choice(), SAMPLED):
            ready = Ready(model, device_drafts)
            with without_waiting():
                ready.run(step, choice)


@pytest.mark.parametrize(
    "planted",
    [
        lambda states: states * float(states.max().item() < 1e9),
        lambda states: states if bool((states < 1e9).all()) else -states,
        lambda states: states.index_fill(1, (states[0, :, 0] > 1e9).nonzero()[:, 0], 0.0),
        lambda states: states + states[states > 1e9].sum(),
        lambda states: states + states.masked_select(states > 1e9).sum(),
        lambda states: states + states[0, 0, :1].tolist()[0] * 0,
        lambda states: states + float(states.detach().numpy()[0, 0, 0]) * 0,
    ],
    ids=["item", "truth", "nonzero", "index by truth", "masked_select", "tolist", "numpy"],
)
def test_a_planted_wait_is_found(planted: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whatever a model does in its forward pass; it is left to the ordinary way then."""
    model = tiny.llama()
    model.model.norm.register_forward_hook(lambda module, args, output: planted(output))
    reason = found(Target(model), "captured")
    assert isinstance(reason, str)
    assert "LlamaForCausalLM: expected operations that the host need not wait for" in reason
    with pytest.raises(HostWaitsError), without_waiting():
        planted(torch.ones(1, 3, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("drafter", ["published:tree=static:12", "recycling:tree=12", "plain"])
def test_captured_steps_give_the_text_without_waiting(drafter: str) -> None:
    model = tiny.llama().cuda()
    ids = tiny.prompt(0, 9).cuda()
    wanted = model.generate(ids, max_new_tokens=60, do_sample=False)
    tr.accelerate(model, drafter)
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=60, do_sample=False), wanted)
        assert "captured as CUDA graphs" in model.acceleration.stats.path


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_itself_finds_no_wait_in_a_step() -> None:
    target = Target(tiny.llama().cuda())
    steps = found(target, "captured")
    assert isinstance(steps, Steps)
    cache = target.new_cache()
    with torch.no_grad():
        steps.begin(target, cache, 64)
        source, plan = steps.host_source(8), Plan(8, 8, BAND, 8, True, False)
        steps.rehearse(target, plan, source, Choice())
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps.rehearse(target, plan, source, Choice())
        finally:
            torch.cuda.set_sync_debug_mode("default")
