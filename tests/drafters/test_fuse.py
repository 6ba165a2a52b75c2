"""Several drafters in one tree: outputs equal those of `generate` for any parts, and each part learns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support import tiny
from support.cases import parameter, thinned
from support.drafters import NAMES as ALL
from support.drafters import example
from support.runs import begun, check_same, fix_costs
from support.tiny import related

import token_recycling as tr
from token_recycling import Context, Draft, Drafter
from token_recycling.drafters.fuse import Fuse
from token_recycling.model.target import Target
from token_recycling.trees.templates import parse_paths

NAMES = tr.drafter_names()
PAIRS = [
    parameter((name, NAMES[(place + far) % len(NAMES)]), every_run=far == 1 and place % 3 == 0)
    for place, name in enumerate(NAMES)
    for far in (0, 1, 3, 7)
]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_any_two_drafters_give_the_output_of_generate(model, names, tmp_path):
    """Greedy and sampled, with few nodes, so that each part loses some of its own."""
    parts = [
        example(name, model, tmp_path / str(place))
        for place, name in enumerate(names)
        if not (tmp_path / str(place)).mkdir()
    ]
    drafter = tr.make_drafter("fuse", parts=parts, nodes=7)
    for seed, sampling in enumerate([{}, {}, {"do_sample": True, "temperature": 0.7, "top_k": 20}]):
        prompt = tiny.prompt(seed, 5).repeat(1, 3)
        check_same(model, drafter, prompt, seed=seed, max_new_tokens=14, **sampling)


def with_fixed_size(drafter):
    """Return the drafter with 16 nodes in place of a number chosen by cost."""
    if drafter.traits.nodes != "auto":
        return drafter
    return dataclasses.replace(drafter, **{"tree" if hasattr(drafter, "tree") else "nodes": 16})


@pytest.mark.parametrize("first", thinned([True, False], 2))
@pytest.mark.parametrize("name", ALL)
def test_part_drafts_and_learns_as_alone_if_all_nodes_fit(model, name, first, tmp_path):
    """With a second drafter that proposes nothing, every step is the same as without. A part sized by cost proposes up
    to the fused drafter's limit, so it gets a fixed size here.
    """
    alone, part = (with_fixed_size(example(name, model, tmp_path / folder)) for folder in ("alone", "part"))
    idle = tr.make_drafter("plain")
    fused = Fuse([part, idle] if first else [idle, part], nodes=1000)
    for seed in range(3):
        prompt = tiny.prompt(seed, 6).repeat(1, 2)
        tokens = [[step.tokens for step in tr.stream(model, prompt, one, max_new_tokens=20)] for one in (alone, fused)]
        assert tokens[0] == tokens[1]


def test_two_parts_accept_more_than_either_alone(model):
    """A draft model that is often correct, and repetitions of the sequence; each has the same number of nodes."""

    def mat(drafter):
        stats = tr.Stats()
        for seed in range(3):
            tr.generate(model, tiny.prompt(seed, 8), drafter=drafter, stats=stats, max_new_tokens=48)
        return stats.mat

    def drafting():
        return tr.make_drafter("draft_model", model=related(model, 0.01), nodes=6)

    alone = max(mat(tr.make_drafter("recycling:tree=6")), mat(drafting()))
    assert mat(Fuse(["recycling:tree=6", drafting()], nodes=6)) > 1.05 * alone


class Scripted(Drafter):
    """Always drafts the same tree, with tokens relative to the root, and records observed steps."""

    def __init__(self, paths, *ahead):
        self.paths, self.ahead, self.steps = paths, ahead, []

    def draft(self, context):
        tokens = (int(context.root) + torch.tensor([0, *self.ahead])) % 16
        return Draft(tokens, parse_paths(self.paths).parents)

    def observe(self, step):
        self.steps.append(step)


def test_every_part_observes_the_whole_verified_tree(counting):
    one, two = Scripted("0 1", 1, 5), Scripted("0 00", 1, 2)
    stats, fused = tr.Stats(), Fuse([one, two], nodes=9)
    (step,) = tr.stream(counting, torch.tensor([3, 4]), fused, max_new_tokens=3, stats=stats)
    assert one.steps == two.steps == [step]
    assert sorted(step.draft.tokens[1:].tolist()) == [5, 6, 9]
    counts, names = stats.drafter_statistics, ("proposed", "kept", "accepted", "accepted_alone")
    assert [counts[f"Scripted.{name}"] for name in names] == [2, 2, 1, 0]
    assert [counts[f"Scripted 2.{name}"] for name in names] == [2, 2, 2, 1]


def test_step_without_a_draft_is_not_counted_as_the_draft_before(counting):
    fused, tokens = Fuse([Scripted("0 1", 1, 5), Scripted("0 00", 1, 2)], nodes=9), torch.tensor([3, 4])
    sequence = begun(fused, tokens, Target(counting))
    draft = sequence.draft(Context(tokens, remaining=9))
    sequence.observe(tr.Step(draft, torch.zeros(len(draft), 16), [0], [5], finished=False))
    learned = [array.copy() for array in fused.calibration]
    sequence.statistics()  # which also resets the counts
    sequence.observe(tr.Step(Draft.chain([5]), torch.zeros(1, 16), [0], [6], finished=False))
    assert sequence.statistics()["Scripted.proposed"] == 0
    assert all(map(np.array_equal, fused.calibration, learned))


def test_needs_and_costs_of_all_parts_count(model):
    parts = [
        "published:tree=chain:2",
        "recycling:k=5",
        "layer_skip:layers=1",
        tr.make_drafter("draft_model", model=model, nodes=4),
    ]
    fused, target, tokens = Fuse(parts), Target(model), tiny.prompt(0, 9)[0]
    traits, sequence = fused.traits, begun(fused, tokens, target)
    assert (traits.on_host, traits.reproducible, traits.top_k, traits.predictions) == (False, False, 5, True)
    assert sequence.pass_cost == 1, "a pass of the draft model, which is the target here"
    context = Context(tokens, remaining=9)
    sequence.draft(context)
    counts = sequence.statistics()
    passes = [counts[f"{name}.draft_forwards"] for name in ("layer_skip", "draft_model")]
    assert context.budget.passes == sum(passes) > max(passes)
    assert sequence.draft(Context(tokens, remaining=2)).depth == 1


def test_nothing_is_verified_if_no_node_pays(counting, monkeypatch):
    """Not even nodes of the first part, which drafts more nodes than the cost curve covers."""
    fix_costs(monkeypatch, (1, 2, 8), (1.0, 90.0, 99.0))
    drafter = Fuse(["published:tree=paper", "suffix"])
    stats = check_same(counting, drafter, torch.arange(20)[None] % 16, max_new_tokens=30)
    assert stats.drafter_statistics["published.proposed"] > 1000
    assert stats.nodes == {1: 30}
