"""Several texts at once: rows of different lengths, padded on the left, accept different numbers of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny
from support.batches import batch
from support.releases import needs
from support.runs import fix_costs

import token_recycling as tr

pytestmark = pytest.mark.core

TREES = ["paper", 6, "chain:4"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated n-grams": {"no_repeat_ngram_size": 3},
    "minimum": {"min_new_tokens": 9},
    "bad words": {"bad_words_ids": [[3], [5, 9]]},
    "sequence bias": {"sequence_bias": {(4,): 2.0}},
    "a set per row": {"prefix_allowed_tokens_fn": lambda row, ids: range(row * 12, row * 12 + 12)},
}


def equal(model, drafter, **arguments):
    """Asserts that the accelerated call returns what the plain one does, and gives its statistics."""
    wanted = model.generate(**arguments)
    stats = tr.Stats()
    ours = tr.generate(model, drafter=drafter, stats=stats, **arguments)
    assert torch.equal(ours, wanted)
    assert stats.steps, "the call was accelerated"
    return stats


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_batch_equals_generate(ending, way):
    for seed, lengths in enumerate([[5], [4, 9], [1, 1, 1], [12, 3, 7], [2, 30, 1, 8], [6, 2, 9, 4, 7]]):
        drafter = tr.make_drafter("recycling", tree=TREES[seed % len(TREES)])
        equal(ending, drafter, **batch(lengths, seed, spare=seed % 2), max_new_tokens=20, **way)


MODEL = tiny.llama(seed=5)
MODEL.generation_config.pad_token_id = 0


@pytest.mark.parametrize("cache_is_seen", [True, pytest.param(False, marks=needs(5, 17))])
def test_those_that_are_left_draft_for_themselves_and_fill_the_passes_alone(counting, cache_is_seen, monkeypatch):
    """Three of four texts end soon. For four a node of each costs half a pass, for one an eighth: of the first four
    tokens that are foreseen two would not pay if the others' were still counted. A cache that somebody will see keeps
    all texts.
    """
    fix_costs(monkeypatch, (1, 128), (5.0, 132.0))
    texts: list[int] = []
    drafter = tr.make_drafter("recycling")
    tr.generate(counting, torch.tensor([[1, 2]]), drafter=drafter, max_new_tokens=60)
    ids = torch.tensor([[5, 6], [5, 6], [9, 10], [5, 6]])
    arguments = {"max_new_tokens": 40, "eos_token_id": 8, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    arguments["return_dict_in_generate"] = cache_is_seen
    wanted, stats = counting.generate(ids, **arguments), tr.Stats()
    hook = counting.register_forward_pre_hook(
        lambda _, args, given: texts.append(len(given["input_ids"])), with_kwargs=True
    )
    ours = tr.generate(counting, ids, drafter=drafter, stats=stats, **arguments)
    hook.remove()
    if cache_is_seen:
        ours, wanted = ours.sequences, wanted.sequences
    assert torch.equal(ours, wanted)
    assert ours.shape[1] > 12, "one text goes on for longer than the others"
    assert texts[-1] == (4 if cache_is_seen else 1)
    assert len(texts) < 8
