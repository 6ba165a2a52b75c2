"""Captured steps on a simulated card: the host never waits, and captures do not count as pass times."""

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
    """Simulate a card whose dispatch mode does not prevent captured passes."""
    monkeypatch.setattr("token_recycling.model.graphs.support._by_surroundings", lambda device: None)
    with PretendCard() as simulated:
        yield simulated


@pytest.fixture
def crossed(card, monkeypatch):
    """Counts of copies between host and card before each step."""
    seen, forward = [], CapturedPasses.forward

    def counted(passes, *arguments):
        seen.append(Counter(card.crossed))
        return forward(passes, *arguments)

    monkeypatch.setattr(CapturedPasses, "forward", counted)
    return seen


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("sequences", [1, 3])
def test_step_sends_once_and_reads_once(crossed, way, sequences):
    model, ids = tiny.llama(), torch.cat([tiny.prompt(seed, 8) for seed in range(sequences)])
    wanted = tiny.seeded(model.generate, ids, max_new_tokens=24, **way)[0]
    model, stats = model.to(CARD), Stats()
    how = {"drafter": "recycling:tree=12", "fast": True, "stats": stats, **way}
    ours = tiny.seeded(tr.generate, model, ids.to(CARD), max_new_tokens=24, **how)[0].cpu()
    assert (sequences > 1 and way["do_sample"]) or torch.equal(ours, wanted)
    assert stats.path.startswith("fast")
    each = [later - earlier for earlier, later in pairwise(crossed[3:])]  # after the trial passes
    # With a penalty the new tokens of each sequence are copied to the device too.
    penalized = sequences if "repetition_penalty" in way else 0
    assert len(each) > 5
    # One more copy where the slots of accepted nodes move.
    assert all(one["to host"] == 1 and not one["read"] and 1 <= one["to card"] <= 2 + 2 * penalized for one in each)


@pytest.mark.parametrize(
    "options", [{}, {"num_key_value_heads": 4}], ids=["grouped heads", "a key head for each query"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nodes", [8, 16, 32, 64])
def test_captured_steps_stay_on_the_card(card, options, dtype, nodes):
    model = tiny.llama(num_attention_heads=4, **options).to(dtype)
    ids, stats = tiny.prompt(0, 9), Stats()
    wanted = model.generate(ids, max_new_tokens=12, do_sample=False)
    how = {"drafter": f"recycling:tree={nodes}", "fast": True, "stats": stats}
    ours = tr.generate(model.to(CARD), ids.to(CARD), max_new_tokens=12, do_sample=False, **how).cpu()
    assert stats.path.startswith("fast")
    assert dtype != torch.float32 or torch.equal(ours, wanted)


@pytest.fixture
def captures(card, monkeypatch):
    """Keys of all captures, which are simulated: a replay calls the function."""
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


def test_accelerate_captures_common_shapes(captures):
    model = tr.accelerate(tiny.llama().to(CARD), "recycling:tree=24", fast=True)
    longest = max(shape.band for shape in captures)  # other bands belong to the comparison with eager passes
    assert {1, 8, 16, 32, 64} == {shape.nodes for shape in captures if shape.band == longest}
    before = len(captures)
    model.generate(tiny.prompt(0, 200).to(CARD), max_new_tokens=20, do_sample=False)
    assert len(captures) == before
    tr.accelerate(model, "recycling:tree=24", fast=True)
    assert len(captures) == before


def test_capture_time_counts_as_compilation_not_as_a_step(monkeypatch):
    """On a simulated clock. Otherwise one capture of a bucket would permanently raise the cost of its passes."""
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
