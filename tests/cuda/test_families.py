"""On a card: outputs of every family equal those of `generate`, with eager and, where supported, captured passes."""

from typing import Any

import pytest
import torch
from support import tiny
from support.architectures import VOCABULARY, model_of
from support.on_device import check_path, check_same, moved
from support.oracle import Oracle

import token_recycling as tr
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.target import Target

pytestmark = pytest.mark.cuda

GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}


def test_outputs_equal_generate(device, case):
    model = model_of(case).to(device)
    supported = not isinstance(passes_or_reason(Target(model)), str)
    for length in (5, 29):
        given = {"input_ids": tiny.prompt(length, length, VOCABULARY).to(device)}
        wanted = model.generate(**given, **GREEDY)
        for fast in (True, False) if supported else (False,):
            stats = tr.Stats()
            drafter = Oracle([wanted[0].cpu()])
            ours = tr.generate(model, **given, drafter=drafter, fast=fast, stats=stats, **GREEDY)
            check_same(model, given, ours, wanted)
            assert stats.mat > 1.5
            if fast:
                check_path(stats, device)


def test_batch_equals_generate(device, case):
    model = model_of(case).to(device)
    ids = torch.cat([tiny.prompt(seed, 12, VOCABULARY) for seed in range(2)])
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    given = moved({"input_ids": ids, "attention_mask": mask}, device)
    wanted = model.generate(**given, **GREEDY)
    check_same(model, given, tr.generate(model, **given, drafter="recycling:tree=12", **GREEDY), wanted)
