"""Every cleanup at the end of a call runs; reproducible requests are not batched; values compare by identity."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.running import Texts

import token_recycling as tr
from token_recycling import Draft
from token_recycling.loop.batch import Batch
from token_recycling.loop.request import Hints, Request
from token_recycling.model.pass_times import PassTimes
from token_recycling.model.tree_layer import Frame

IDS = tiny.prompt(0, 6)


class CloseError(Exception):
    """Raised by `Batch.give_back`, `Request.finish` or `PassTimes.keep`."""


def fails(*_):
    raise CloseError


@pytest.mark.parametrize("broken", ["give back", "finish", "keep"])
@pytest.mark.parametrize("stopped", [False, True])
def test_every_cleanup_runs_even_if_another_raises(model, monkeypatch, broken, stopped):
    ran = []
    ends = {"give back": (Batch, "give_back"), "finish": (Request, "finish"), "keep": (PassTimes, "keep")}
    for name, (kind, method) in ends.items():
        monkeypatch.setattr(kind, method, lambda *_, name=name: (ran.append(name), fails() if name == broken else 0))
    steps = tr.stream(model, IDS, max_new_tokens=8)
    if stopped:
        next(steps)
    with pytest.raises(CloseError):
        steps.close() if stopped else list(steps)
    assert ran == ["give back", "finish", "keep"]


def test_reproducible_request_is_not_batched(model):
    with pytest.raises(ValueError, match="reproducible"):
        Texts(model).join(IDS, 8, tr.make_drafter("recycling", reproducible=True))


def values(model):
    """Return two values of each kind."""
    step, other, *_ = tr.stream(model, IDS, "prompt_lookup", max_new_tokens=4)
    ids = torch.tensor([1, 2]), torch.tensor([1, 3])
    return [
        (step, other),
        tuple(Draft.chain(tokens) for tokens in ids),
        tuple(tr.Context(tokens, 3) for tokens in ids),
        tuple(Hints(prediction=tokens) for tokens in ids),
        tuple(Frame(tokens[None], 8) for tokens in ids),
    ]


def test_values_with_tensors_can_be_compared_and_hashed(model):
    for first, second in values(model):
        assert first != second
        assert first in [second, first]
        assert len({first, second, first}) == 2
