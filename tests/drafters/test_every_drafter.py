"""Outputs equal those of `model.generate`, for every registered drafter and every way of calling. A way is a small
program that calls a `generate` function: it runs once with the model's own, and with each drafter through one of our
functions. The results must be equal.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support import tiny, ways
from support.cases import parameter, thinned
from support.drafters import NAMES, Garbage, example
from support.elsewhere import THERE, another_device, put_there
from support.runs import drafts_of
from support.side_by_side import assert_same
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LogitsProcessorList
from transformers.generation import logits_process

import token_recycling as tr
from token_recycling._util.text_stream import StepRecorder
from token_recycling.trees.templates import Template, chain, paper


def generated(model, drafter):
    return partial(tr.generate, model, drafter=drafter)


def accelerated(model, drafter):
    def generate(*inputs, **arguments):
        result = model.generate(*inputs, **arguments)
        assert model.acceleration.fallback is None
        return result

    tr.accelerate(model, drafter)
    return generate


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


VARIANTS: dict[str, dict[str, Any]] = {
    "draft_model sequence": {"mode": "sequence", "depth": 4, "nodes": 4},
    "draft_model tree": {"mode": "tree", "nodes": 20, "theta_prob": 0.1},
    "draft_model graph": {"mode": "graph", "nodes": 20, "theta_prob": 0.02, "tau": 1},
    "recycling paper": {"tree": "paper"},
    "recycling rank paths": {"tree": "2 1 0 02 00 20 001", "memory": 0, "history": 0},
    "recycling all at once": {"k": 16, "orders": 4, "history": 64, "tree": 30},
    "published first": {"update": "first", "tree": "chain:4"},
}
"""Drafters with other options; the draft model often agrees with the target."""
DRAFTERS = ("garbage", *tr.drafter_names(), *VARIANTS)
ALTERNATING = ("garbage", "draft_model")
"""Drafters that share the ways of `generate` in every run: one that is always wrong, and one that is nearly always
right, since the model drafts for itself.
"""


def in_every_run(surface, way, name):
    """Return whether a combination runs in every run. Nightly, all drafters are called in all ways; else the default
    drafter is called in all ways of `generate`, and other combinations are a sample.
    """
    if surface is not generated:
        turn = TABLE[surface].index(way)
        return turn % 2 == 0 if name == "recycling" else name in ALTERNATING and turn == 0
    if name == "recycling":
        return True
    if name in ALTERNATING:
        return ways.EVERY_WAY.index(way) % 2 == ALTERNATING.index(name)
    return way is (ways.sampled, ways.padded_batch)[DRAFTERS.index(name) % 2]


GRID = [
    parameter(
        *(surface, way, name),
        every_run=in_every_run(surface, way, name),
        id=f"{surface.__name__}-{way.__name__}-{name}",
    )
    for name in DRAFTERS
    for surface, those in TABLE.items()
    for way in those
]


def drafter_for(name, model, folder):
    if name == "garbage":
        return Garbage([chain(3), paper(), Template([-1], [0])], vocab_size=model.config.vocab_size)
    if name in VARIANTS:
        others = {"model": tiny.related(model)} if name.startswith("draft_model") else {}
        return tr.make_drafter(name.split()[0], **others, **VARIANTS[name])
    return example(name, model, folder)


@pytest.mark.core
@pytest.mark.parametrize(("surface", "way", "name"), GRID)
def test_output_equals_that_of_generate(surface, way, name, tmp_path):
    model = ways.model_for(way)
    drafter = drafter_for(name, model, tmp_path)
    try:
        found = way(model, surface(model, drafter))
    finally:
        tr.decelerate(model)
    assert_same(found, ways.wanted(way))


@pytest.mark.parametrize("name", NAMES)
def test_output_after_a_prompt_read_separately(name, tmp_path):
    """With a streamer the first token comes from the prefill alone. An unfinished call leaves no trace."""
    model, ids, stats = tiny.llama(max_position_embeddings=128), tiny.prompt(0, 20).repeat(1, 2), tr.Stats()
    drafter = example(name, model, tmp_path)
    next(tr.stream(model, tiny.prompt(1, 9), drafter, max_new_tokens=20))
    arguments = {"max_new_tokens": 20, "do_sample": False}
    output = tr.generate(model, ids, drafter=drafter, stats=stats, streamer=StepRecorder(), **arguments)
    assert stats.first_tokens == 1
    assert output.tolist() == model.generate(ids, **arguments).tolist()
    assert stats.drafter.startswith(name)
    assert "\n" not in stats.drafter


def test_ways_cover_early_ends():
    """Sequences end early where they may, at different lengths."""
    for way in (ways.end_of_sequence, ways.stop_strings, ways.criteria):
        lengths = {text.shape[1] - ids.shape[1] for text, ids in zip(ways.wanted(way), ways.prompts(), strict=False)}
        assert min(lengths) < ways.NEW, way.__name__
    assert (ways.wanted(ways.padded_batch)[0][:, -1] == 0).any()
    assert (ways.wanted(ways.padded_batch)[0][:, -1] != 0).any()
    assert ways.wanted(ways.last_position)[0].shape[1] == 33
    assert int(torch.stack(ways.wanted(ways.beyond_16_bits)[:1]).max()) > 2**16


@pytest.mark.parametrize("name", thinned(tr.drafter_names(), kept="recycling".__eq__))
def test_model_may_be_on_another_device(model, name, tmp_path):
    """The prompt is on either device; drafts are on the model's device, here a stand-in."""
    drafter = example(name, model, tmp_path)
    prompt = tiny.prompt(0, 6).repeat(1, 3)
    wanted = model.generate(prompt, max_new_tokens=12)
    with another_device():
        put_there(model)
        for device in (torch.device("cpu"), THERE):
            ours = tr.generate(model, prompt.to(device), drafter=drafter, max_new_tokens=12)
            assert ours.device == device
            assert torch.equal(ours.cpu(), wanted)


@pytest.mark.parametrize("name", thinned(tr.drafter_names(), kept=("recycling", "draft_model", "fuse").__contains__))
def test_fork_has_what_was_learned_before_it_and_nothing_later(model, name, tmp_path):
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


class CountingCopies(TorchDispatchMode):
    """Counts the elements that operations copy."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.elements += result.numel() if func in (torch.ops.aten.cat.default, torch.ops.aten.clone.default) else 0
        return result


@pytest.mark.parametrize("name", ["draft_model", "eagle", "mtp", "dflash"])
def test_later_drafts_copy_no_more_after_a_long_prompt(name, tmp_path):
    """Modules that read the sequence append keys and values in place, and query heads share them."""

    def copied(length):
        model = tiny.llama()
        drafter = example(name, model, tmp_path)
        if name == "draft_model":
            drafter.nodes = 8  # also where a draft cannot pay
        counts, start = [], drafter.start

        def counted(*given):
            sequence = start(*given)
            draft = sequence.draft

            def counting(context):
                with CountingCopies() as copies:
                    result = draft(context)
                counts.append(copies.elements)
                return result

            sequence.draft = counting
            return sequence

        drafter.start = counted
        tr.generate(model, tiny.prompt(0, length), drafter=drafter, max_new_tokens=20, do_sample=False)
        return max(counts[2:])

    assert copied(400) < copied(20) + 400
