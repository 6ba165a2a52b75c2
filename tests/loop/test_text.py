"""Where a text ends, that none has to have a limit, and that what callers were shown stays as it was."""

import pytest
import torch
from support import tiny
from support.cases import paired
from support.drafters import learned
from transformers import StoppingCriteriaList

import token_recycling as tr

ENDLESS = 10**12
"""Tokens that no memory holds."""


@pytest.mark.parametrize("fast", [False, True])
def test_a_text_ends_with_the_first_of_several_ends(counting, fast):
    """Whatever says it first; a criterion that is asked too often fails the test, so that it does not go on."""

    def never(ids, scores, **_):
        assert ids.shape[1] < 12, "goes on after its end"
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
def test_a_text_without_a_limit_ends_where_it_ends(counting, drafter, fast):
    """As does a batch of them."""
    arguments = {"max_new_tokens": ENDLESS, "eos_token_id": 9, "pad_token_id": 0, "do_sample": False}
    for ids in (torch.tensor([[3]]), torch.tensor([[3], [7]])):
        wanted = counting.generate(ids, **arguments)
        assert torch.equal(tr.generate(counting, ids, drafter=drafter, fast=fast, **arguments), wanted)


def test_criteria_and_processors_may_keep_what_they_see(model):
    def shown(generate, **more):
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

    wanted = shown(model.generate)
    ours = shown(tr.accelerate(model).generate)
    assert model.acceleration.fallback is None
    assert len(ours) == len(wanted) == 120
    assert all(map(torch.equal, ours, wanted))
