"""Ends and limits of sequences; processors and criteria are called as `generate` calls them."""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.drafters import learned
from support.noting import noted
from transformers import (
    EtaLogitsWarper,
    LogitsProcessorList,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)
from transformers.generation import TopHLogitsWarper

import token_recycling as tr
from token_recycling.loop.request import TokenSelector, TokenSequence
from token_recycling.model.target import Target


def selector(*processors, sample=False):
    sequence = TokenSequence(torch.tensor([1, 2]), StoppingCriteriaList([MaxLengthCriteria(9)]))
    return TokenSelector(sequence, LogitsProcessorList(processors), sample)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_most_probable_token_is_chosen_in_every_precision(dtype):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert selector()(logits) == int(logits.argmax())


def test_drafts_are_warped_by_warpers_but_not_by_processors():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    warpers = [TemperatureLogitsWarper(0.7), EtaLogitsWarper(0.05), TopHLogitsWarper(0.4)]
    penalty = RepetitionPenaltyLogitsProcessor(2.0)
    expected = LogitsProcessorList(warpers)(None, logits.clone())
    assert torch.equal(selector(penalty, *warpers, sample=True).warp(logits), expected)


def test_tokens_after_the_end_reach_neither_cache_nor_matrix(counting):
    """The draft continues after the end, 5. No slot after it is kept, and the logits after it are not learned."""
    drafter = learned(counting, "chain:8")
    drafter.matrix.candidates[6:] = 0
    drafter.matrix.candidates[5] = 6
    before = drafter.matrix.candidates.clone()
    cache = Target(counting).new_cache().cache
    (step,) = tr.stream(counting, torch.tensor([0]), drafter, max_new_tokens=20, eos_token_id=5, past_key_values=cache)
    assert step.tokens == [1, 2, 3, 4, 5]
    assert (step.finished, step.beyond) == (True, 5)
    assert cache.get_seq_length() == 5
    assert torch.equal(drafter.matrix.candidates[5:], before[5:])
    wanted = counting.generate(torch.tensor([[0]]), max_new_tokens=20, eos_token_id=5)
    assert wanted[0].tolist() == [0, *step.tokens]


def test_llama_continues_past_its_positions_without_drafts():
    model = tiny.llama(max_position_embeddings=20)
    ids = tiny.prompt(0, 10)
    text, sizes = ids[0].tolist(), {}
    for step in tr.stream(model, ids, "published", tree="paper", max_new_tokens=30):
        sizes[len(text)] = len(step.draft)
        text += step.tokens
    assert text == model.generate(ids, max_new_tokens=30)[0].tolist()
    assert sizes[10] == 81
    assert {size for length, size in sizes.items() if length >= 20} == {1}


def test_steps_have_the_models_logits(model):
    ids = tiny.prompt(0, 12)
    text = ids
    for step in tr.stream(model, ids, tree="paper", max_new_tokens=20):
        assert int(step.draft.tokens[0]) == int(text[0, -1])
        assert len(step.accepted) == len(step.tokens)
        with torch.no_grad():
            wanted = model(input_ids=text).logits[0, -1]
        torch.testing.assert_close(step.logits[0], wanted, atol=1e-4, rtol=1e-4)
        text = torch.cat([text, torch.tensor([step.tokens])], dim=1)
    assert step.finished


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(0, dtype=torch.long), r"got \(0,\)"),
        (torch.zeros(2, 3, dtype=torch.long), r"got \(2, 3\)"),
        (torch.zeros(3), "float32"),
        (torch.tensor([1, 64]), "from 0 to 63, got 1 to 64"),
        (torch.tensor([-1, 3]), "from 0 to 63, got -1 to 3"),
    ],
)
def test_invalid_prompts_are_refused(model, ids, message):
    with pytest.raises(ValueError, match=message):
        tr.stream(model, ids)


def test_end_of_a_long_prompt_is_read_with_the_first_draft():
    model, ids = tiny.llama(max_position_embeddings=2048), tiny.prompt(0, 700).repeat(1, 2)
    wanted, stats = model.generate(ids, max_new_tokens=12), tr.Stats()
    rows, _ = noted(model, lambda given: given["input_ids"].shape[1])
    assert torch.equal(tr.generate(model, ids, drafter="suffix", stats=stats, max_new_tokens=12), wanted)
    assert sum(rows[:2]) == 1399 + 12
    assert rows[1] == 512
    assert len(rows) == stats.steps + 1


def test_step_is_learned_after_its_tokens_are_delivered(counting):
    drafter = tr.make_drafter("recycling", tree=4)
    steps = tr.stream(counting, torch.tensor([3, 4]), drafter, max_new_tokens=9)
    next(steps)
    assert not drafter.matrix.filled.any()
    next(steps)
    assert drafter.matrix.filled.any()
    learned_before = drafter.matrix.filled.sum()
    steps.close()
    assert drafter.matrix.filled.sum() > learned_before, "the delivered steps of a closed stream are learned"
