"""Ends of sequences, sequences without a limit, and tensors that callers may keep."""

import pytest
import torch
from support import tiny
from support.cases import paired
from support.drafters import learned
from transformers import StoppingCriteriaList

import token_recycling as tr

ENDLESS = 10**12
"""More tokens than memory can hold."""


@pytest.mark.parametrize("fast", [False, True])
def test_sequence_ends_at_the_first_of_several_ends(counting, fast):
    """A criterion called after the end fails the test instead of letting it run forever."""

    def never(ids, scores, **_):
        assert ids.shape[1] < 12, "called after the end"
        return ids[:, -1] < 0

    def at_five(ids, scores, **_):
        return ids[:, -1] == 5

    for ends in (
        {"eos_token_id": 5, "max_new_tokens": 8},
        {"max_new_tokens": 5, "stopping_criteria": [never]},
        {"max_new_tokens": 8, "stopping_criteria": [at_five, never]},
        {"eos_token_id": 5, "max_new_tokens": 8, "stopping_criteria": [never]},
    ):
        drafter = learned(counting, "chain:8")
        steps = tr.stream(counting, torch.tensor([[0]]), drafter, fast=fast, **ends)
        assert [token for step in steps for token in step.tokens] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("drafter", "fast"), paired(["recycling", "published", "suffix", "prompt_lookup", "lookahead"], [False, True])
)
def test_unlimited_sequences_end_at_their_end_token(counting, drafter, fast):
    """Single sequences and batches."""
    arguments = {"max_new_tokens": ENDLESS, "eos_token_id": 9, "pad_token_id": 0, "do_sample": False}
    for ids in (torch.tensor([[3]]), torch.tensor([[3], [7]])):
        wanted = counting.generate(ids, **arguments)
        assert torch.equal(tr.generate(counting, ids, drafter=drafter, fast=fast, **arguments), wanted)


def test_criteria_and_processors_may_keep_their_inputs(model):
    def recorded_inputs(generate, **more):
        kept = []

        def criterion(input_ids, scores, **_):
            kept.append(input_ids)
            return torch.zeros(len(input_ids), dtype=torch.bool)

        def processor(input_ids, scores):
            kept.append(input_ids)
            return scores

        generate(
            tiny.prompt(0, 4),
            do_sample=False,
            max_new_tokens=60,
            logits_processor=[processor],
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
        return kept

    wanted = recorded_inputs(model.generate)
    ours = recorded_inputs(tr.accelerate(model).generate)
    assert model.acceleration.fallback is None
    assert len(ours) == len(wanted) == 120
    assert all(map(torch.equal, ours, wanted))
