"""Whatever a drafter proposes, the text is that of `model.generate`: every registered drafter in every way of calling.

A way is a small program that calls a `generate` function: it runs once with the model's own, and with each drafter
through one of our surfaces, and must return the same.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support import tiny, ways
from support.drafters import NAMES, Garbage, example
from support.elsewhere import THERE, another_device, put_there
from support.runs import drafts_of, fix_costs, fix_work
from transformers import LogitsProcessorList
from transformers.generation import logits_process

import token_recycling as tr
from token_recycling.drafters._shared.base import CausalDrafter, ModelDrafter
from token_recycling.drafters.draft_model import DraftModel
from token_recycling.drafters.suffix import Suffix
from token_recycling.trees.templates import chain, paper, root_only


def generated(model, drafter):
    return partial(tr.generate, model, drafter=drafter)


def accelerated(model, drafter):
    def generate(*inputs, **arguments):
        result = model.generate(*inputs, **arguments)
        assert model.acceleration.fallback is None
        return result

    tr.accelerate(model, drafter)
    return generate


def custom(model, drafter):
    return partial(model.generate, custom_generate=tr.custom_generate(drafter))


def streamed(model, drafter):
    def generate(ids, temperature=1.0, top_k=0, **arguments):
        if top_k:
            warpers = [logits_process.TemperatureLogitsWarper(temperature), logits_process.TopKLogitsWarper(top_k)]
            arguments["logits_processor"] = LogitsProcessorList(warpers)
        arguments.pop("pad_token_id", None)
        steps = tr.stream(model, ids, drafter, **arguments)
        return torch.cat([ids, torch.tensor([[token for step in steps for token in step.tokens]])], dim=1)

    return generate


def fast(model, drafter):
    """Steps of constant shapes, which are not captured on a CPU."""
    return partial(tr.generate, model, drafter=drafter, fast=True)


TABLE = {
    generated: ways.EVERY_WAY,
    accelerated: [ways.greedy, ways.sampled, ways.padded_batch, ways.stop_strings, ways.conversation, ways.streamer],
    custom: [ways.greedy, ways.sampled, ways.padded_batch, ways.criteria, ways.scores, ways.conversation],
    streamed: [ways.greedy, ways.one_token, ways.end_of_sequence, ways.sampled, ways.logits_processor, ways.criteria],
    fast: [
        ways.greedy,
        ways.one_token,
        ways.end_of_sequence,
        ways.criteria,
        ways.conversation,
        ways.streamer,
        ways.last_position,
    ],
}


THROUGH_ALL = ("garbage", "draft_model", "recycling")
"""Drafters that every run takes through all ways: one that is always wrong, one that is nearly always right since the
model drafts for itself, and the default. The others go through three ways, and through all of them nightly.
"""
GRID = [
    pytest.param(
        *(surface, way, name),
        id=f"{surface.__name__}-{way.__name__}-{name}",
        marks=[]
        if name in THROUGH_ALL or (surface is generated and way in (ways.greedy, ways.sampled, ways.padded_batch))
        else [pytest.mark.nightly],
    )
    for name in ("garbage", *tr.drafter_names())
    for surface, those in TABLE.items()
    for way in those
]


@pytest.mark.core
@pytest.mark.parametrize(("surface", "way", "name"), GRID)
def test_the_text_is_that_of_generate(surface, way, name, tmp_path):
    model = ways.model_for(way)
    if name == "garbage":
        drafter = Garbage([chain(3), paper(), root_only()], vocab_size=model.config.vocab_size)
    else:
        drafter = example(name, model, tmp_path)
    try:
        found = way(model, surface(model, drafter))
    finally:
        tr.decelerate(model)
    ways.assert_as_wanted(way, found)


@pytest.mark.parametrize("name", NAMES)
def test_after_a_prompt_that_is_read_alone(name, tmp_path):
    """The first token is waited for; drafting begins behind it."""
    model, ids = tiny.llama(max_position_embeddings=128), tiny.prompt(0, 20).repeat(1, 2)
    steps = list(tr.stream(model, ids, example(name, model, tmp_path), max_new_tokens=20))
    assert len(steps[0].draft.tree) == 1
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)[0, 40:]
    assert [token for step in steps for token in step.tokens] == wanted.tolist()


VARIANTS: dict[str, dict[str, Any]] = {
    "draft_model sequence": {"mode": "sequence", "depth": 4, "nodes": 4},
    "draft_model tree": {"mode": "tree", "nodes": 20, "theta_prob": 0.1},
    "draft_model graph": {"mode": "graph", "nodes": 20, "theta_prob": 0.02, "tau": 1},
    "recycling paper": {"tree": "paper"},
    "published first": {"update": "first", "tree": "chain:4"},
}


@pytest.mark.parametrize("way", [ways.greedy, ways.sampled, ways.padded_batch])
@pytest.mark.parametrize("variant", VARIANTS)
def test_so_it_is_with_other_options(variant, way):
    model, stats, name = ways.model_for(way), tr.Stats(), variant.split()[0]
    others = {"model": tiny.related(model)} if name == "draft_model" else {}
    drafter = tr.make_drafter(name, **others, **VARIANTS[variant])
    ways.assert_as_wanted(way, way(model, partial(tr.generate, model, drafter=drafter, stats=stats)))
    assert stats.mat > (1.2 if name == "draft_model" else 1), "drafts are accepted"


def test_the_ways_are_worth_a_test():
    """Texts end early where they may, and not all of them at once."""
    for way in (ways.end_of_sequence, ways.stop_strings, ways.criteria):
        lengths = {text.shape[1] - ids.shape[1] for text, ids in zip(ways.wanted(way), ways.prompts(), strict=False)}
        assert min(lengths) < ways.NEW, way.__name__
    assert (ways.wanted(ways.padded_batch)[0][:, -1] == 0).any()
    assert (ways.wanted(ways.padded_batch)[0][:, -1] != 0).any()
    assert ways.wanted(ways.last_position)[0].shape[1] == 33
    assert int(torch.stack(ways.wanted(ways.beyond_16_bits)[:1]).max()) > 2**16


@pytest.mark.parametrize("name", NAMES)
def test_a_drafter_says_in_one_line_what_it_does(model, name, tmp_path):
    drafter, stats = example(name, model, tmp_path), tr.Stats()
    tr.generate(model, tiny.prompt(0, 5), drafter=drafter, stats=stats, max_new_tokens=4)
    assert stats.drafter.startswith(name)
    assert "\n" not in stats.drafter


@pytest.mark.parametrize("name", NAMES)
def test_the_model_may_be_on_another_device(model, name, tmp_path):
    """Than the prompt; drafts are where the model is, on a stand-in for such a device."""
    drafter = example(name, model, tmp_path)
    prompt = tiny.prompt(0, 6).repeat(1, 3)
    wanted = model.generate(prompt, max_new_tokens=12)
    with another_device():
        put_there(model)
        for device in (torch.device("cpu"), THERE):
            ours = tr.generate(model, prompt.to(device), drafter=drafter, max_new_tokens=12)
            assert ours.device == device
            assert torch.equal(ours.cpu(), wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_fork_knows_what_was_learned_before_and_nothing_later(model, name, tmp_path, monkeypatch):
    """What passes cost and drafting takes, which all of them learn, apart."""
    fix_costs(monkeypatch, (1, 64), (1.0, 2.0))
    fix_work(monkeypatch)

    drafts = partial(drafts_of, model, ids=tiny.prompt(0, 6).repeat(1, 3), max_new_tokens=24)
    drafter = example(name, model, tmp_path)
    drafts(drafter)
    wanted = drafts(drafter.fork())
    for learning in (drafter.fork(), drafter.fork()):
        for seed in range(4):
            prompt = tiny.prompt(0, 6).repeat(1, 3) if seed == 3 else tiny.prompt(seed, 9)
            tr.generate(model, prompt, drafter=learning, max_new_tokens=24)
    assert drafts(drafter.fork()) == wanted
    assert drafts(drafter) == wanted


OUT_OF_RANGE: list[tuple[str, dict[str, Any]]] = [
    ("dflash", {"k": 0}),
    ("dflash", {"tree": "chain:5"}),
    ("dflash", {"tree": "0 1 2", "k": 2}),
    ("draft_model", {"mode": "forest"}),
    ("draft_model", {"depth": 0}),
    ("draft_model", {"k": 0}),
    ("draft_model", {"tau": 0}),
    ("draft_model", {"theta_prob": 1.5}),
    ("draft_model", {"theta_sib": -0.1}),
    ("draft_model", {"nodes": 0}),
    ("draft_model", {"nodes": "many"}),
    ("eagle", {"k": 0}),
    ("eagle", {"depth": 0}),
    ("eagle", {"tree": "wide"}),
    ("eagle", {"tree": "chain:3", "depth": 2}),
    ("eagle", {"tree": "0 1 2", "k": 2}),
    ("lookahead", {"window": 0}),
    ("lookahead", {"ngram_size": 1}),
    ("lookahead", {"guesses": 0}),
    ("medusa", {"k": 0}),
    ("medusa", {"tree": "0 00 000"}),
    ("medusa", {"tree": "0 1 2", "k": 2}),
    ("medusa", {"tree": "static:0"}),
    ("medusa", {"tree": "wide"}),
    ("mtp", {"k": 0}),
    ("mtp", {"depth": 0}),
    ("mtp", {"tree": 0}),
    ("mtp", {"tree": "paper"}),
    ("mtp", {"layers": "others"}),
    ("prompt_lookup", {"num_tokens": 0}),
    ("prompt_lookup", {"max_matching_ngram_size": 0}),
    ("published", {"k": 0}),
    ("published", {"update": "newest"}),
    ("rest", {"nodes": 0}),
    ("rest", {"num_tokens": 0}),
    ("rest", {"max_matches": 0}),
    ("rest", {"max_matching_ngram_size": 1}),
    ("specdec_pp", {"threshold": 1.5}),
    ("specdec_pp", {"min_length": 0}),
    ("specdec_pp", {"min_length": 5, "max_length": 4}),
    ("suffix", {"num_tokens": 0}),
    ("suffix", {"min_match": 0}),
    ("suffix", {"factor": 0}),
]


@pytest.mark.parametrize(("name", "options"), OUT_OF_RANGE, ids=str)
def test_options_out_of_range_are_refused(name, options, model, tmp_path):
    made = example(name, model, tmp_path)
    with pytest.raises(ValueError, match=next(iter(options))):
        replace(made, **options)


@pytest.mark.parametrize(
    ("spec", "option"),
    [
        ("eagle:head=x,learn=true", "learn"),
        ("fuse:recycling+suffix,asks=paying", "asks"),
        ("layer_skip:layers=1,mode=graph", "mode"),
        ("mtp:learn=true", "learn"),
        ("rest:datastore=x,min_matching_ngram_size=1", "min_matching_ngram_size"),
        ("recycling:states=true", "states"),
        ("recycling:primed=true", "primed"),
        ("published:learns_prompt=true", "learns_prompt"),
    ],
)
def test_a_removed_option_is_refused_with_a_remedy(spec, option):
    with pytest.raises(ValueError, match=f"no longer has the option '{option}': .*"):
        tr.make_drafter(spec)


def test_a_class_has_its_name_without_the_registry():
    assert (Suffix().name, DraftModel("folder").name, Suffix().fork().name) == ("suffix", "draft_model", "suffix")
    assert CausalDrafter.name == ModelDrafter.name == "", "bases have none"
