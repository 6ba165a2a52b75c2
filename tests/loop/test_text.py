"""The memory of a text grows with it, not with its limit, and what was handed out stays as it was."""

import pytest
import torch
from support import tiny
from support.drafters import learned
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

import token_recycling as tr
from token_recycling.loop.state import Sequence

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


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("drafter", ["recycling", "published", "suffix", "prompt_lookup", "lookahead"])
def test_a_text_without_a_limit_ends_where_it_ends(counting, drafter, fast):
    """As does a batch of them."""
    arguments = {"max_new_tokens": ENDLESS, "eos_token_id": 9, "pad_token_id": 0, "do_sample": False}
    for ids in (torch.tensor([[3]]), torch.tensor([[3], [7]])):
        wanted = counting.generate(ids, **arguments)
        assert torch.equal(tr.generate(counting, ids, drafter=drafter, fast=fast, **arguments), wanted)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_was_handed_out_stays_as_it_was(monkeypatch, elsewhere):
    """However far the text grows afterwards, here and on a device with a memory of its own."""
    if elsewhere:
        monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    text = Sequence(tiny.prompt(0, 5)[0], StoppingCriteriaList([MaxLengthCriteria(ENDLESS)]), padding=2)
    kept = []
    for token in range(2000):
        text.push(token)
        kept.append((text.on_host, text.tokens, text.padded[0, 2:]))
    whole = torch.cat([tiny.prompt(0, 5)[0, 2:], torch.arange(2000)])
    for length, views in enumerate(kept, start=4):
        assert all(torch.equal(view, whole[:length]) for view in views)


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
