"""Captured steps on a card, which is played: nothing in them makes the host wait; captures are not learned from."""

from collections import Counter, OrderedDict
from itertools import pairwise

import pytest
import torch
from support import tiny
from support.pretend_card import CARD, PretendCard

import token_recycling as tr
from token_recycling._util.compiled import compiling
from token_recycling.loop.pacer import Clock
from token_recycling.loop.stats import Stats
from token_recycling.model.graphs import capture as capturing
from token_recycling.model.graphs.capture import Graphs
from token_recycling.model.graphs.passes import CapturedPasses

pytestmark = pytest.mark.usefixtures("card_of_torch")

WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
}


@pytest.fixture
def card(monkeypatch):
    """A card whose dispatch mode is no reason against captured passes."""
    monkeypatch.setattr("token_recycling.model.graphs.support._by_surroundings", lambda device: None)
    with PretendCard() as played:
        yield played


@pytest.fixture
def crossed(card, monkeypatch):
    """What has crossed between host and card when each step begins."""
    seen, forward = [], CapturedPasses.forward

    def counted(passes, *arguments):
        seen.append(Counter(card.crossed))
        return forward(passes, *arguments)

    monkeypatch.setattr(CapturedPasses, "forward", counted)
    return seen


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("sequences", [1, 3])
def test_a_step_sends_once_and_reads_once(crossed, way, sequences):
    model, ids = tiny.llama(), torch.cat([tiny.prompt(seed, 8) for seed in range(sequences)])
    wanted = tiny.seeded(model.generate, ids, max_new_tokens=24, **way)[0]
    model, stats = model.to(CARD), Stats()
    how = {"drafter": "recycling:tree=12", "fast": True, "stats": stats, **way}
    ours = tiny.seeded(tr.generate, model, ids.to(CARD), max_new_tokens=24, **how)[0].cpu()
    assert (sequences > 1 and way["do_sample"]) or torch.equal(ours, wanted)
    assert stats.path.startswith("fast")
    each = [later - earlier for earlier, later in pairwise(crossed[3:])]  # after those that try passes out
    # With a penalty the new tokens of each sequence go to the device as well.
    noted = sequences if "repetition_penalty" in way else 0
    assert len(each) > 5
    # One more where the slots of accepted nodes move.
    assert all(one["to host"] == 1 and not one["read"] and 1 <= one["to card"] <= 2 + 2 * noted for one in each)


@pytest.mark.parametrize(
    "options", [{}, {"num_key_value_heads": 4}], ids=["grouped heads", "a key head for each query"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nodes", [8, 16, 32, 64])
def test_captured_steps_have_few_shapes_and_stay_on_the_card(card, options, dtype, nodes):
    model = tiny.llama(num_attention_heads=4, **options).to(dtype)
    ids, stats = tiny.prompt(0, 9), Stats()
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
    how = {"drafter": f"recycling:tree={nodes}", "fast": True, "stats": stats}
    ours = tr.generate(model.to(CARD), ids.to(CARD), max_new_tokens=12, do_sample=False, **how).cpu()
    assert stats.path.startswith("fast")
    assert dtype != torch.float32 or torch.equal(ours, wanted)


@pytest.fixture
def captures(card, monkeypatch):
    """The keys of all captures, which are played: a replay calls the function."""
    made, plans = [], {}

    def contains(self, key):
        return key in plans.setdefault(id(self), set())

    def run(self, key, function):
        if key not in plans.setdefault(id(self), set()):
            plans[id(self)].add(key)
            made.append(key)
        return function()

    monkeypatch.setattr(Graphs, "__contains__", contains)
    monkeypatch.setattr(Graphs, "run", run)
    monkeypatch.setattr(Graphs, "forget", lambda self: plans.pop(id(self), None))
    return made


def test_common_shapes_are_captured_when_a_model_is_accelerated(captures):
    model = tr.accelerate(tiny.llama().to(CARD), "recycling:tree=24", fast=True)
    longest = max(shape.band for shape in captures)  # the others are of the comparison with plain passes
    assert {1, 8, 16, 32, 64} == {shape.nodes for shape in captures if shape.band == longest}
    before = len(captures)
    model.generate(tiny.prompt(0, 200).to(CARD), max_new_tokens=20, do_sample=False)
    assert len(captures) == before
    tr.accelerate(model, "recycling:tree=24", fast=True)
    assert len(captures) == before


def test_what_a_capture_takes_is_compilation_and_no_step(monkeypatch):
    """By a clock that is played: else one capture of a bucket would make its passes look dear for good."""
    now = [0.0]
    for module in (capturing.time, __import__("token_recycling.loop.pacer").loop.pacer.time):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    class Graph:
        def replay(self):
            now[0] += 0.007

    def capture(self, function):
        now[0] += 0.150
        return Graph(), function()

    made = Graphs.__new__(Graphs)
    made.device, made._kept, made.stopped = torch.device("cuda"), OrderedDict(), False
    monkeypatch.setattr(Graphs, "_capture", capture)
    stats, before = Stats(), compiling.seconds
    clock = Clock(stats, torch.device("cpu"))
    clock.reads_prompt = False
    for _ in range(2):
        clock.restart()
        made.run("key", lambda: 1)
        clock.lap("forward")
        assert clock.pass_seconds == pytest.approx(0.007)
    assert stats.compile_seconds == compiling.seconds - before == pytest.approx(0.150)
