"""Steps that are replayed, without Python, give the text: nothing that changes from step to step is left in them."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.recorded import RecordedGraphs

import token_recycling as tr
from token_recycling.cuda_graphs.runner import StepRunner
from token_recycling.cuda_graphs.support import runner_or_reason
from token_recycling.model.tree_model import TreeModel


@pytest.mark.parametrize("drafter", ["published:tree=static:12", "recycling:tree=12", "recycling:tree=paper", "plain"])
def test_replayed_steps_give_the_text(drafter, monkeypatch):
    monkeypatch.setattr("token_recycling.cuda_graphs.runner.Graphs", RecordedGraphs)
    model, made = tiny.llama(), tr.make_drafter(drafter)
    ordinary = tr.make_drafter(drafter)
    for seed, length in enumerate((1, 9, 225)):
        ids, stats, wanted_stats = tiny.prompt(seed, length), tr.Stats(), tr.Stats()
        text = [
            token
            for step in tr.stream(model, ids, made, fast=True, stats=stats, max_new_tokens=60)
            for token in step.tokens
        ]
        # Not a stream, where the ordinary way brings the first token of a long prompt without a draft.
        wanted = tr.generate(model, ids, drafter=ordinary, fast=False, stats=wanted_stats, max_new_tokens=60)
        assert text == wanted[0, length:].tolist()
        assert stats.lengths == wanted_stats.lengths
    steps = runner_or_reason(TreeModel(model))
    assert isinstance(steps, StepRunner)
    graphs = steps._graphs
    assert isinstance(graphs, RecordedGraphs)
    assert graphs.replays > 3 * len(graphs.kept) > 3


def test_replayed_draws_are_drawn_anew(monkeypatch):
    monkeypatch.setattr("token_recycling.cuda_graphs.runner.Graphs", RecordedGraphs)
    model = tr.accelerate(tiny.llama(), "plain", fast=True)
    torch.manual_seed(0)
    texts = {tuple(model.generate(tiny.prompt(0, 4), max_new_tokens=6, do_sample=True)[0].tolist()) for _ in range(8)}
    assert len(texts) == 8


def test_what_python_keeps_is_what_it_was_when_it_was_recorded():
    """The recorder itself: a number that changes in Python does not change in a replay; one in a tensor does."""
    number, tensor = 1, torch.tensor([1])
    graphs = RecordedGraphs(torch.device("cpu"))

    def function():
        return tensor * 10 + number

    assert int(graphs.run("key", function, [])) == 11
    number = 5
    tensor += 1
    assert int(graphs.run("key", function, [])) == 21
