"""With `reproducible=True` drafts depend only on the request, so forward passes are equal to the bit."""

import pytest
import torch
from support import tiny
from support.drafters import NAMES, example
from support.runs import fix_costs

import token_recycling as tr
from token_recycling.costs import OnlineCurve
from token_recycling.loop.pacer import Overhead
from token_recycling.model.pass_times import pass_times
from token_recycling.model.target import Target

REPRODUCIBLE = {"fuse", "lookahead", "plain", "prompt_lookup", "published", "recycling", "suffix"}
"""The drafters of the package that can be reproducible."""


def drafted(model, ids, drafter, **options):
    """Return the tree, its tokens and its logits, to the bit, of every step."""
    torch.manual_seed(1)
    steps = tr.stream(model, ids, drafter, max_new_tokens=16, **options)
    return [(step.draft.parents.tolist(), step.draft.tokens.tolist(), step.logits.tolist()) for step in steps]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_do_not_depend_on_earlier_calls(model, name, tmp_path, monkeypatch):
    ids, made = tiny.prompt(0, 12).repeat(1, 2), example(name, model, tmp_path)
    if not made.traits.reproducible:
        assert name not in REPRODUCIBLE
        with pytest.raises(ValueError, match="reproducible=True"):
            tr.make_drafter(made, reproducible=True)
        return
    assert name in REPRODUCIBLE
    drafter = tr.make_drafter(made, reproducible=True)
    first = drafted(model, ids, drafter)
    for seed in range(3):
        drafted(model, tiny.prompt(seed, 20), drafter, do_sample=True)
    fix_costs(monkeypatch, (1, 64), (1.0, 50.0))
    assert drafted(model, ids, drafter) == first
    again = tr.make_drafter(example(name, model, tmp_path / "again"), reproducible=True)
    assert drafted(tiny.llama(), ids, again) == first


def test_drafts_depend_on_earlier_calls_without_reproducible(model):
    """A reproducible drafter begins with what it had learned when it was made reproducible."""
    ids, made = tiny.prompt(0, 12).repeat(1, 2), tr.make_drafter("recycling")
    untaught = drafted(model, ids, made)
    drafter = tr.make_drafter(made, reproducible=True)
    taught = drafted(model, ids, drafter)
    assert drafted(model, ids, made) != untaught != taught
    assert drafted(model, ids, drafter) == taught


@pytest.mark.measured
def test_pass_times_are_neither_measured_nor_used(model, monkeypatch):
    monkeypatch.setattr(OnlineCurve, "record_time", lambda *_: pytest.fail("a pass was measured"))
    monkeypatch.setattr(Overhead, "count", lambda *_: pytest.fail("drafting was measured"))
    drafted(model, tiny.prompt(0, 12), "recycling", reproducible=True)
    assert not pass_times(Target(model))._curves


def test_streamer_does_not_change_forward_passes(model, monkeypatch):
    """Without the option the pass over the prompt verifies a draft unless a streamer waits for the first token."""
    tr.accelerate(model, reproducible=True)
    shapes, forward = [], Target.forward

    def noted(target, inputs, *args, **kwargs):
        shapes[-1].append(tuple(inputs.tokens.shape))
        return forward(target, inputs, *args, **kwargs)

    class Streamer:
        put = end = staticmethod(lambda *_: None)

    monkeypatch.setattr(Target, "forward", noted)
    for streamer in (None, Streamer()):
        shapes.append([])
        model.generate(tiny.prompt(0, 25).repeat(1, 2), max_new_tokens=12, do_sample=False, streamer=streamer)
        assert model.acceleration.fallback is None
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) > 2


def test_fast_and_reproducible_cannot_be_combined(model):
    with pytest.raises(tr.NoFastPathError, match="reproducible"):
        tr.generate(model, tiny.prompt(0, 8), fast=True, reproducible=True, max_new_tokens=4, do_sample=False)
