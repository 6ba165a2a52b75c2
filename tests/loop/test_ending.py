"""What ends a call runs whatever fails; requests with fixed passes stay out of running batches; values compare by
identity.
"""

from __future__ import annotations

import copy

import pytest
import torch
from support import tiny
from support.running import Texts

import token_recycling as tr
from token_recycling.drafters.prompt_lookup import PromptLookup
from token_recycling.hf.batched import DecodingThread
from token_recycling.loop import step as loop
from token_recycling.loop.state import RequestState
from token_recycling.model.pass_times import PassTimes

IDS = tiny.prompt(0, 6)


class CloseError(Exception):
    """Of `TreeStepper.close`, `RequestState.finish` or `PassTimes.keep`."""


def fails(*_):
    raise CloseError


@pytest.mark.parametrize("broken", ["close", "finish", "keep"])
@pytest.mark.parametrize("stopped", [False, True])
def test_each_end_of_a_call_runs_whatever_the_others_raise(model, monkeypatch, broken, stopped):
    ran = []
    ends = {"close": (loop.TreeStepper, "close"), "finish": (RequestState, "finish"), "keep": (PassTimes, "keep")}
    for name, (kind, method) in ends.items():
        monkeypatch.setattr(kind, method, lambda *_, name=name: (ran.append(name), fails() if name == broken else 0))
    steps = tr.stream(model, IDS, max_new_tokens=8)
    with pytest.raises(CloseError):
        if stopped:
            next(steps)
            steps.close()
        else:
            list(steps)
    assert ran == ["close", "finish", "keep"]


def test_a_reproducible_request_shares_no_passes(model):
    with pytest.raises(ValueError, match="reproducible"):
        Texts(model).join(IDS, 8, tr.make_drafter("recycling", reproducible=True))


@pytest.mark.parametrize("name", ["recycling", "suffix", "prompt_lookup", "plain"])
def test_a_reproducible_call_of_a_decoding_thread_is_decoded_alone(model, name, monkeypatch):
    drafter = tr.make_drafter(name, reproducible=True)
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    thread = DecodingThread(model)
    monkeypatch.setattr(type(thread._batch), "join", fails)
    try:
        assert torch.equal(thread.model(drafter, 0).generate(IDS, max_new_tokens=8, do_sample=False), expected)
    finally:
        thread.close()


def values(model):
    (step, *_) = tr.stream(model, IDS, "prompt_lookup", max_new_tokens=2)
    context = tr.Context(IDS[0], 3)
    return [step, step.draft, context, tr.stream, PromptLookup().traits]


def test_values_with_tensors_can_be_compared_and_hashed(model):
    for value in values(model):
        assert value == value  # noqa: PLR0124
        assert value in [None, value]
        assert len({value, value}) == 1
    step, draft, context, *_ = values(model)
    for value in (step, draft, context):
        assert value != copy.copy(value)
