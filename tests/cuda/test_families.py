"""On a card: models of every family write the text of `generate`, with captured passes where they hold and without."""

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


def test_texts_are_those_of_generate(device, case):
    model = model_of(case).to(device)
    holds = not isinstance(passes_or_reason(Target(model)), str)
    for length in (5, 29):
        given = {"input_ids": tiny.prompt(length, length, VOCABULARY).to(device)}
        wanted = model.generate(**given, **GREEDY)
        for fast in (True, False) if holds else (False,):
            stats = tr.Stats()
            drafter = Oracle([wanted[0].cpu()])
            ours = tr.generate(model, **given, drafter=drafter, fast=fast, stats=stats, **GREEDY)
            check_same(model, given, ours, wanted)
            assert stats.mat > 1.5
            if fast:
                check_path(stats, device)


def test_rows_of_a_batch_are_those_of_generate(device, case):
    model = model_of(case).to(device)
    ids = torch.cat([tiny.prompt(seed, 12, VOCABULARY) for seed in range(2)])
    mask = torch.ones_like(ids)
    ids[0, :5] = mask[0, :5] = 0
    given = moved({"input_ids": ids, "attention_mask": mask}, device)
    wanted = model.generate(**given, **GREEDY)
    check_same(model, given, tr.generate(model, **given, drafter="recycling:tree=12", **GREEDY), wanted)
