"""A fast step is one graph without a break, and nothing in it makes the host wait; seen without an accelerator."""

import pytest
import torch
from support import architectures, runs, tiny
from torch._dynamo.utils import counters
from transformers.generation import logits_process as warpers

import token_recycling as tr
from token_recycling.cuda_graphs import runner_of
from token_recycling.cuda_graphs.sources import DeviceSource, HostSource
from token_recycling.cuda_graphs.step import Choice, StepPlan, verify
from token_recycling.cuda_graphs.support import runner_or_reason
from token_recycling.cuda_graphs.syncs import HostWaitsError, without_waiting
from token_recycling.model.prefill import prefill
from token_recycling.model.tree_model import TreeModel
from token_recycling.trees.draft import Draft

pytestmark = pytest.mark.usefixtures("nothing_compiled")

TREE = tr.Tree.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
SAMPLED = Choice(
    (warpers.TemperatureLogitsWarper(0.8), warpers.TopKLogitsWarper(9), warpers.TopPLogitsWarper(0.9)), True
)
BAND = 256
GREEDY = Choice()


def step(model, cache, *arguments):
    """A whole step in one function, as it is captured: also the move of the accepted slots."""
    verified = verify(model, cache, *arguments)
    cache.commit(verified.accepted.path, verified.accepted.number)
    return verified


class Ready:
    """A model with a text in its slots, and everything that a step is given."""

    def __init__(self, model, device_drafts=False, length=12):
        self.target = TreeModel(model)
        self.steps = steps = runner_of(self.target)
        text = tiny.prompt(0, length + 1, 64)[0]
        cache = self.target.new_cache()
        prefill(self.target, [text], cache)
        steps.begin(cache, length + 8)
        steps.root.copy_(text[-1:])
        steps.cache.shared.band = BAND
        self.source: HostSource | DeviceSource
        if device_drafts:
            drafter = tr.make_drafter("published", tree=TREE)
            retrieval = runs.begun(drafter, text, self.target).retrieval
            assert retrieval is not None
            self.source = DeviceSource(retrieval, torch.device("cpu"))
            self.plan = StepPlan(len(TREE), TREE.depth + 1, BAND, 8, False, True)
        else:
            self.source = steps.host_source(8)
            self.source.send(Draft(TREE, torch.cat([text[-1:], torch.arange(1, len(TREE))])))
            self.plan = StepPlan(8, 8, BAND, 8, True, False)

    @torch.no_grad()
    def run(self, function, choice=GREEDY):
        """What a step gives, from the state in which the text was read; the slots are part of it."""
        state = [self.steps.cache.shared.length, self.steps.root, *self.source.state(), *self.steps.cache.stores]
        before = [tensor.clone() for tensor in state]
        target, steps = self.target, self.steps
        with target.attending():
            verified = function(
                target.model, steps.cache, target.info.layers, self.plan, self.source, choice, steps.root, steps.seed
            )
        after = [verified.report, verified.logits, *(tensor.clone() for tensor in state)]
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return after


def one_graph(ready, backend, choice=GREEDY):
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
def test_the_whole_step_is_one_graph(model, device_drafts, choice):
    one_graph(Ready(model, device_drafts), "eager", choice)


@pytest.mark.slow
@pytest.mark.parametrize("device_drafts", [False, True], ids=["host drafts", "device drafts"])
def test_it_is_one_graph_of_torchs_own_operations(model, device_drafts):
    one_graph(Ready(model, device_drafts), "aot_eager")


KINDS = """
mixtral gemma gpt2 gpt_neox gpt_bigcode opt stablelm cohere falcon gptj deepseek_v3 olmoe diffllama biogpt
mistral window of 8
gemma3n_text window of 8, shared keys and values
gpt_oss window of 8
cohere2 window of 8
"""
"""One of every way to embed positions, to attend, to share heads or experts."""
_names = [*KINDS.split("\n")[1].split(), *KINDS.strip().split("\n")[1:]]
FAST = [case for case in architectures.SUPPORTED if str(case) in _names]


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST, ids=str)
def test_it_is_one_graph_with_families_of_every_kind(case):
    one_graph(Ready(architectures.model_of(case)), "eager")


def test_nothing_in_a_step_makes_the_host_wait(model):
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
def test_a_planted_wait_is_found(planted):
    """Whatever a model does in its forward pass; it is left to the ordinary way then."""
    model = tiny.llama()
    norm = model.model.norm.forward
    model.model.norm.forward = lambda states: planted(norm(states))
    reason = runner_or_reason(TreeModel(model))
    assert isinstance(reason, str)
    assert "LlamaForCausalLM: expected operations that the host need not wait for" in reason
    with pytest.raises(HostWaitsError), without_waiting():
        planted(torch.ones(1, 3, 4))
