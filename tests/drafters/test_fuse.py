"""Several drafters in one tree: the text stays that of `generate`, whoever takes part, and each part learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support import tiny
from support.batches import batch
from support.drafters import NAMES as ALL
from support.drafters import example
from support.runs import check_same, fix_costs, fix_work
from support.tiny import related

import token_recycling as tr
from token_recycling import Draft, Drafter, Step
from token_recycling.bench.run.methods import parse
from token_recycling.drafters.fuse import Fuse
from token_recycling.trees.templates import parse_paths

NAMES = tr.drafter_names()
PAIRS = [
    pytest.param((name, NAMES[(place + far) % len(NAMES)]), marks=[pytest.mark.nightly] * (far != 1))
    for place, name in enumerate(NAMES)
    for far in (0, 1, 3, 7)
]


@pytest.mark.parametrize("names", PAIRS, ids="+".join)
def test_any_two_give_the_text_of_generate(model, names, tmp_path):
    """Greedy and drawn, with room for few nodes, so that each part loses some of its own."""
    parts = [
        example(name, model, tmp_path / str(place))
        for place, name in enumerate(names)
        if not (tmp_path / str(place)).mkdir()
    ]
    drafter = tr.make_drafter("fuse", parts=parts, nodes=7)
    for seed, sampling in enumerate([{}, {}, {"do_sample": True, "temperature": 0.7, "top_k": 20}]):
        prompt = tiny.prompt(seed, 5).repeat(1, 3)
        check_same(model, drafter, prompt, seed=seed, max_new_tokens=14, **sampling)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("first", [True, False])
def test_with_room_for_all_a_part_drafts_and_learns_as_alone(model, name, first, tmp_path, monkeypatch):
    """Beside a drafter that proposes nothing every step is the same as without."""
    fix_costs(monkeypatch, (1, 64), (1.0, 2.0))
    fix_work(monkeypatch)
    alone, part = example(name, model, tmp_path / "alone"), example(name, model, tmp_path / "part")
    idle = tr.make_drafter("plain")
    fused = Fuse([part, idle] if first else [idle, part], nodes=1000)
    for seed in range(3):
        prompt = tiny.prompt(seed, 6).repeat(1, 2)
        tokens = [[step.tokens for step in tr.stream(model, prompt, one, max_new_tokens=30)] for one in (alone, fused)]
        assert tokens[0] == tokens[1]


def test_a_batch_equals_generate(model):
    """Each row has drafts of its own; rows end at different steps."""
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 7, 0
    parts = ["recycling:tree=9", tr.make_drafter("draft_model", model=related(model), nodes=9), "lookahead"]
    drafter, stats = Fuse(parts, nodes=5), tr.Stats()
    for seed, lengths in enumerate([[4, 9], [12, 3, 7], [2, 30, 1, 8]]):
        inputs = {**batch(lengths, seed), "max_new_tokens": 24}
        assert torch.equal(tr.generate(model, drafter=drafter, stats=stats, **inputs), model.generate(**inputs))
    assert stats.mat > 1.3


def test_more_than_two_and_fused_ones_can_be_fused(model):
    drafter = tr.make_drafter(
        "fuse:fuse(recycling(tree=9)+suffix,nodes=8)+prompt_lookup+published(tree=chain:4),nodes=12"
    )
    assert [part.name for part in drafter.drafters] == ["fuse", "prompt_lookup", "published"]
    stats = check_same(model, drafter, tiny.prompt(1, 6).repeat(1, 3), max_new_tokens=40)
    assert stats.mat > 1.5
    assert max(stats.nodes) <= 13


def test_two_together_accept_more_than_either(model):
    """A draft model that is often right, and what the text says again; all have room for the same number of nodes."""

    def mat(drafter):
        stats = tr.Stats()
        for seed in range(6):
            tr.generate(model, tiny.prompt(seed, 8), drafter=drafter, stats=stats, max_new_tokens=48)
        return stats.mat

    def drafting():
        return tr.make_drafter("draft_model", model=related(model, 0.01), nodes=6)

    alone = max(mat(tr.make_drafter("recycling:tree=6")), mat(drafting()))
    assert mat(Fuse(["recycling:tree=6", drafting()], nodes=6)) > 1.05 * alone


@pytest.mark.nightly
def test_the_shipped_pair_accepts_more_together(shipped):
    model, tokenizer = shipped
    folder, mats = Path(__file__).parents[2] / "models", []
    part = f"draft_model(model={folder / 'draft'},nodes=16)"
    for drafter in ("recycling:tree=16", f"draft_model:{part[12:-1]}", f"fuse:recycling(tree=16)+{part},nodes=16"):
        stats, made = tr.Stats(), tr.make_drafter(drafter)
        for prompt in sorted((folder / "prompts").glob("*.py"))[:4]:
            ids = tokenizer(prompt.read_text(), return_tensors="pt")["input_ids"]
            list(tr.stream(model, ids, made, max_new_tokens=64, stats=stats))
        mats.append(stats.mat)
    assert mats[2] > 1.05 * max(mats[:2])


# What parts are told


@dataclass
class Scripted(Drafter):
    """Always the same draft, tokens counted from the root."""

    paths: str = "0"
    ahead: tuple[int, ...] = (1,)
    steps: list[Step] = field(default_factory=list)

    def draft(self, context):
        tokens = (int(context.root) + torch.tensor([0, *self.ahead])) % 16
        return Draft(parse_paths(self.paths), tokens)

    def observe(self, step):
        self.steps.append(step)

    def statistics(self):
        return {"calls": len(self.steps)}


def test_who_earns_is_counted(counting):
    """The target counts. One says the next number and a wrong one, the other the next two: of three nodes two are kept,
    those that are sure.
    """
    one, two = Scripted("0 1", (1, 5)), Scripted("0 00", (1, 2))
    stats, drafter = tr.Stats(), Fuse([one, two], nodes=2)
    list(tr.stream(counting, torch.tensor([3]), drafter, max_new_tokens=61, stats=stats))
    counted = stats.drafter_statistics
    assert stats.steps == counted["Scripted.calls"] == counted["Scripted 2.calls"]
    # Of the 61 tokens every step says three, but the last one only one, for which nothing is drafted.
    assert stats.steps == 21
    assert counted["Scripted.accepted"] == counted["Scripted 2.accepted"] / 2 == 20
    assert (counted["Scripted.accepted_alone"], counted["Scripted 2.accepted_alone"]) == (0, 20)
    assert counted["Scripted.proposed"] == counted["Scripted 2.proposed"] == 40
    assert counted["Scripted 2.kept"] == counted["Scripted.kept"] * 2 == 40


def test_every_part_sees_all_that_was_verified(counting):
    one, two = Scripted("0 1", (1, 5)), Scripted("0 00", (1, 2))
    drafter = Fuse([one, two], nodes=9)
    (step,) = tr.stream(counting, torch.tensor([3, 4]), drafter, max_new_tokens=3)
    assert one.steps == two.steps == [step]
    assert sorted(step.draft.tokens[1:].tolist()) == [5, 6, 9]


def test_recycling_learns_from_what_others_propose(counting):
    """Token 9 was never said: another drafter proposed it, and what the target says after it is known."""
    recycling = tr.make_drafter("recycling:tree=4,k=2")
    drafter = Fuse([recycling, Scripted("0 1", (1, 6))], nodes=9)
    list(tr.stream(counting, torch.tensor([3]), drafter, max_new_tokens=2))
    assert recycling.matrix.candidates[9].tolist() == [10, 11]


def test_what_was_learned_stays(model):
    prompt, drafter, mats = tiny.prompt(4, 8), tr.make_drafter("fuse:recycling(tree=8)+suffix,nodes=8"), []
    for _ in range(2):
        stats = tr.Stats()
        tr.generate(model, prompt, drafter=drafter, stats=stats, max_new_tokens=40)
        mats.append(stats.mat)
    assert mats[1] > 1.2 * mats[0]


def test_nothing_proposed_is_plain_decoding(model):
    stats = check_same(model, Fuse(["plain", "plain"]), tiny.prompt(0, 4), max_new_tokens=6)
    assert (stats.steps, stats.plain_steps) == (6, 1)


# How it is written


def test_it_is_made_from_text_and_in_python(model):
    written = tr.make_drafter("fuse:recycling(tree=16,k=4)+suffix,nodes=32")
    assert [type(part).__name__ for part in written.drafters] == ["Recycling", "Suffix"]
    assert (written.drafters[0].tree, written.drafters[0].k, written.nodes) == (16, 4, 32)
    assert tr.make_drafter("fuse:parts=recycling+suffix").nodes == "auto"
    made = tr.make_drafter("recycling", tree=16)
    assert tr.make_drafter("fuse", parts=[made, "suffix"]).drafters[0] is made
    tr.accelerate(model, "fuse:recycling(tree=8)+suffix", nodes=8)
    model.generate(tiny.prompt(0, 4), max_new_tokens=6)
    assert model.acceleration.stats.drafter.startswith("fuse: 8 nodes at most, best first, of (recycling: tree 8 nodes")
    tr.decelerate(model)


def test_it_is_a_method_of_the_bench():
    method = parse("fuse:recycling(tree=16)+draft_model(model=models/draft),nodes=32")
    assert method.label == "fuse (recycling(tree=16)+draft_model(model=models/draft), nodes=32)"
    with pytest.raises(ValueError, match="after 'prompt_lookup_hf' must be NAME=VALUE"):
        parse("prompt_lookup_hf:10")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fuse", "fuse needs parts, got none: write fuse:parts=VALUE"),
        ("fuse:recycling", "got 1: 'recycling'"),
        ("fuse:" + "+".join(["suffix"] * 7), "got 7"),
        ("fuse:recycling+nonsense", "unknown drafter 'nonsense'"),
        (
            "fuse:recycling+suffix:factor=3",
            "got 'recycling.suffix:factor=3'; options of a part of it are in parentheses",
        ),
        ("fuse:recycling+suffix:3", r"must be NAME or NAME\(OPTION=VALUE,...\), got 'suffix:3'"),
        ("fuse:recycling(tree=16+suffix", "parentheses do not match"),
        ("fuse:recycling(wide=16)+suffix", "recycling has no option 'wide'"),
        ("fuse:recycling+draft_model", "draft_model needs model, got none"),
        ("fuse:recycling+suffix,nodes=0", "nodes .*got 0"),
        ("fuse:recycling+suffix,nodes=some", "option nodes of fuse must be a whole number or auto, got 'some'"),
        ("fuse:recycling+suffix,asks=paying", "no longer has the option 'asks'"),
        ("fuse:recycling+suffix,32", "options after 'fuse' must be NAME=VALUE with a name of parts, nodes, got '32'"),
    ],
)
def test_what_cannot_be_fused_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        tr.make_drafter(spec)


def test_one_drafter_cannot_be_two_parts():
    drafter = tr.make_drafter("suffix")
    with pytest.raises(ValueError, match="one drafter twice"):
        Fuse([drafter, drafter])


def test_where_no_node_pays_none_is_verified(counting, monkeypatch):
    """Not even those of the first part, which drafts more than the curve knows of."""
    fix_costs(monkeypatch, (1, 2, 8), (1.0, 90.0, 99.0))
    drafter = Fuse(["published:tree=paper", "suffix"])
    stats = check_same(counting, drafter, torch.arange(20)[None] % 16, max_new_tokens=30)
    assert stats.drafter_statistics["published.proposed"] > 1000
    assert stats.nodes == {1: 30}
