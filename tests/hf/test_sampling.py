"""Sampling: with a seed the same tokens as `generate`, without one the same distribution."""

import pytest
import torch
from support import tiny
from support.drafters import learned
from support.tiny import seeded

import token_recycling as tr

pytestmark = pytest.mark.core

WARPERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 10},
    {"top_p": 0.8},
    {"top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2},
    {"min_p": 0.05, "typical_p": 0.9},
]


@pytest.mark.parametrize("warpers", WARPERS, ids=lambda warpers: ", ".join(warpers) or "none")
@pytest.mark.parametrize("tree", ["paper", "static:8"])
def test_a_seed_gives_the_tokens_of_generate(model, warpers, tree):
    """And leaves the global generator where `generate` leaves it, so that whatever is drawn next is the same too."""
    drafter, stats = tr.make_drafter("published", tree=tree), tr.Stats()
    sampling = {"do_sample": True, "max_new_tokens": 20, **warpers}
    for seed in range(6):
        ids = tiny.prompt(seed, 1 + 4 * seed)
        wanted, state = seeded(model.generate, ids, seed=seed, **sampling)
        ours, our_state = seeded(tr.generate, model, ids, drafter=drafter, stats=stats, seed=seed, **sampling)
        assert torch.equal(ours, wanted)
        assert torch.equal(our_state, state)
    assert stats.tokens == 6 * 20


def test_sampled_drafts_are_accepted(counting):
    """The counting model at a low temperature is nearly certain, so that sampling fills its chains too."""
    stats = tr.Stats()
    tr.generate(
        counting,
        torch.tensor([[0]]),
        drafter=learned(counting, "chain:4"),
        stats=stats,
        max_new_tokens=20,
        do_sample=True,
        temperature=0.01,
    )
    assert stats.mat == 5.0
