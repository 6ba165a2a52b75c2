"""Batches: left-padded rows of different lengths that accept different numbers of tokens, with custom stopping
criteria, scores and logits, and caches passed by the caller.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import tiny
from support.batches import EOS, batch, padded
from support.cases import paired
from support.drafters import example
from support.noting import noted
from support.runs import fix_costs
from transformers import (
    DynamicCache,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

import token_recycling as tr

pytestmark = pytest.mark.core

TREES = ["paper", 6, "chain:4"]
ENDS = [5, 9, 14, 22, 33, 41, 60]


@pytest.mark.parametrize("cache_is_seen", [True, False])
def test_remaining_rows_draft_more_after_others_have_ended(counting, cache_is_seen, monkeypatch):
    """Three of four sequences end early. One node per row costs half a forward pass for four rows, and an eighth for
    one row. If ended rows were still counted, two of the first four predicted tokens would not pay off. A cache that is
    returned to the caller keeps all rows.
    """
    fix_costs(monkeypatch, (1, 128), (5.0, 132.0))
    drafter = tr.make_drafter("recycling")
    tr.generate(counting, torch.tensor([[1, 2]]), drafter=drafter, max_new_tokens=60)
    ids = torch.tensor([[5, 6], [5, 6], [9, 10], [5, 6]])
    arguments = {"max_new_tokens": 40, "eos_token_id": [8, 99], "attention_mask": torch.ones_like(ids)}  # 8 pads
    arguments["return_dict_in_generate"] = cache_is_seen
    wanted = counting.generate(ids, **arguments)

    texts, hook = noted(counting, lambda given: len(given["input_ids"]))
    ours = tr.generate(counting, ids, drafter=drafter, **arguments)
    hook.remove()
    if cache_is_seen:
        ours, wanted = ours.sequences, wanted.sequences
    assert torch.equal(ours, wanted)
    assert ours.shape[1] > 12, "one sequence must continue after the others"
    assert texts[-1] == (4 if cache_is_seen else 1)
    assert len(texts) < 8


@pytest.mark.parametrize("name", ["recycling", "eagle"])
@pytest.mark.parametrize("tails", [[0, 0, 0], [0, 5, 9]])
@pytest.mark.parametrize("window", [0, 8])
def test_shared_prefix_of_a_batch_is_read_once(window, tails, name, tmp_path):
    """Also for a drafter that reads the hidden states of prompts, and where layers drop slots."""
    model = tiny.windowed(window) if window else tiny.llama()
    drafter, shared = example(name, model, tmp_path), tiny.prompt(0, 70)[0]
    inputs = padded([torch.cat([shared, tiny.prompt(row, tail)[0]]) for row, tail in enumerate(tails)])
    arguments = {**inputs, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    read, hook = noted(model, lambda given: given["input_ids"].numel())
    ours = tr.generate(model, drafter=drafter, **arguments)
    hook.remove()
    assert read[0] == 69
    assert (read[1] == 3 * 9) if any(tails) else max(read[1:]) < 69
    assert torch.equal(ours, model.generate(**arguments))


def test_draft_model_reads_a_shared_prefix_of_a_batch_once():
    model = tiny.llama()
    draft, ids = tiny.related(model), tiny.prompt(0, 70).repeat(3, 1)
    read, hook = noted(draft, lambda given: given["input_ids"].numel())
    drafter = tr.make_drafter("draft_model", model=draft, nodes=8)
    ours = tr.generate(model, ids, drafter=drafter, max_new_tokens=12, do_sample=False, pad_token_id=0)
    hook.remove()
    assert [rows for rows in read if rows > 20] == [69]
    assert torch.equal(ours, model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0))


class Recording(StoppingCriteria):
    """A stopping criterion that records the ids it receives."""

    def __init__(self, answer):
        self.answer, self.seen = answer, []

    def __call__(self, input_ids, scores, **kwargs):
        assert scores is None
        self.seen.append(input_ids.tolist())
        return self.answer(self, input_ids)


def at_a_token(self, ids):
    return ids[:, -1] % 9 == 2


def after_every_row_had_the_token(self, ids):
    """Return one answer for all rows from stored state, as lm-eval does."""
    self.done = getattr(self, "done", torch.zeros(len(ids), dtype=torch.bool)) | (ids[:, -1] % 9 == 2)
    return bool(self.done.all())


def after_seven_calls(self, ids):
    return torch.full((len(ids),), len(self.seen) >= 7)


def when_two_rows_agree(self, ids):
    return ids[:, -1] == ids.roll(1, dims=0)[:, -1]


ANSWERS = [at_a_token, after_every_row_had_the_token, after_seven_calls, when_two_rows_agree]


@pytest.mark.parametrize(("answer", "eos"), paired(ANSWERS, [None, EOS]))
def test_criteria_see_every_column_of_the_batch_once_and_in_order(ending, answer, eos):
    """So criteria that keep state, compare rows or answer for all rows return the same as in `generate`."""
    ending.generation_config.eos_token_id = eos
    for seed, tree in enumerate(TREES):
        inputs = {**batch([4, 9, 5], seed, spare=seed), "max_new_tokens": 16}
        inputs |= {"return_dict_in_generate": True, "output_logits": True}
        criteria, stats = [Recording(answer), Recording(answer)], tr.Stats()
        wanted = ending.generate(**inputs, stopping_criteria=StoppingCriteriaList(criteria[:1]))
        how = {"drafter": f"recycling:tree={tree}", "stats": stats}
        ours = tr.generate(ending, **inputs, **how, stopping_criteria=StoppingCriteriaList(criteria[1:]))
        assert torch.equal(ours.sequences, wanted.sequences)
        torch.testing.assert_close(ours.logits, wanted.logits, atol=1e-4, rtol=1e-4)
        assert criteria[1].seen == criteria[0].seen
        new = wanted.sequences[:, inputs["input_ids"].shape[1] :]
        kept = new.flip(1).cumsum(1) > 0 if eos is not None else new >= 0  # without an end token no row is padded
        assert stats.tokens == int(kept.sum())
        assert stats.prompt_tokens == int(inputs["attention_mask"].sum())


SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
PROCESSORS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n-grams": {"no_repeat_ngram_size": 2, "min_new_tokens": 6},
    "repetition": {"repetition_penalty": 3.0},
    "watermark": {"watermarking_config": WatermarkingConfig(greenlist_ratio=0.5, bias=2.0, context_width=1)},
}


@pytest.mark.parametrize("way", PROCESSORS.values(), ids=PROCESSORS.keys())
def test_scores_and_logits_of_a_batch_equal_those_of_generate(ending, way):
    """Including the padding that `generate` scores after a row has ended."""
    for seed, lengths in enumerate([[5, 9, 3], [6, 6, 6, 6], [7]]):
        inputs = {**batch(lengths, seed, spare=1), "max_new_tokens": 16, "eos_token_id": ENDS, **SCORES, **way}
        wanted, ours = ending.generate(**inputs), tr.generate(ending, drafter="recycling:tree=paper", **inputs)
        assert torch.equal(ours.sequences, wanted.sequences)
        for name in ("scores", "logits"):
            assert len(getattr(ours, name)) == len(getattr(wanted, name))
            ours_then, theirs_then = (torch.stack(getattr(output, name)) for output in (ours, wanted))
            torch.testing.assert_close(ours_then, theirs_then, atol=1e-4, rtol=1e-4)
        assert ours.stats.mat >= 1


@pytest.mark.parametrize("beams", [1, 2])
def test_allowed_tokens_depend_on_the_row(ending, beams):
    """The row index counts groups of beams."""
    inputs, model = {**batch([4, 9, 5, 7], 0), "max_new_tokens": 16}, tr.accelerate(copy.deepcopy(ending))
    allowed = PrefixConstrainedLogitsProcessor(lambda row, ids: list(range(row, 64, 3)), beams)
    wanted = ending.generate(**inputs, logits_processor=[allowed])
    assert torch.equal(model.generate(**inputs, logits_processor=[allowed]), wanted)
    assert model.acceleration.fallback is None


def test_cache_shorter_than_the_padding_of_a_row(ending):
    """The cache holds no token of a row that begins after the cached slots."""
    inputs, answers = batch([9, 2], 0), []
    for generate in (ending.generate, lambda **given: tr.generate(ending, **given)):
        cache = DynamicCache(config=ending.config)
        with torch.no_grad():
            ending(**{name: tensor[:, :5] for name, tensor in inputs.items()}, past_key_values=cache)
        answers.append(generate(**inputs, past_key_values=cache, max_new_tokens=12))
        assert cache.get_seq_length() == answers[-1].shape[1] - 1
    assert torch.equal(*answers)


def test_first_tokens_of_all_rows_are_counted(model):
    stats = tr.Stats()
    tr.generate(model, **batch([5, 9, 3], 1), drafter="plain", stats=stats, max_new_tokens=4, do_sample=False)
    assert (stats.first_tokens, stats.tokens) == (3, 12)
