"""Sampling: with a seed the same tokens as `generate`, without one the same distribution."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support import tiny
from support.chi_square import fit
from support.drafters import learned
from support.tiny import seeded
from transformers import LlamaForCausalLM

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
def test_a_seed_gives_the_tokens_of_generate(model: LlamaForCausalLM, warpers: dict[str, Any], tree: str) -> None:
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


def test_nothing_is_drawn_after_the_end(model: LlamaForCausalLM) -> None:
    ends = {"eos_token_id": list(range(0, 64, 3)), "pad_token_id": 0}
    drafter = tr.make_drafter("published", tree="paper")
    lengths = set()
    for seed in range(20):
        ids = tiny.prompt(seed, 5)
        arguments = {"do_sample": True, "max_new_tokens": 20, "temperature": 0.3, **ends}
        wanted, state = seeded(model.generate, ids, seed=seed, **arguments)
        ours, our_state = seeded(tr.generate, model, ids, drafter=drafter, seed=seed, **arguments)
        assert torch.equal(ours, wanted)
        assert torch.equal(our_state, state)
        lengths.add(ours.shape[1])
    assert len(lengths) > 3


def test_sampled_drafts_are_accepted(counting: LlamaForCausalLM) -> None:
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


def test_sampled_texts_follow_the_models_distribution() -> None:
    """Every text of 3 tokens over a vocabulary of 4, against its exact probability; no seed is shared with anything."""
    vocab_size, runs = 4, 700
    model = tiny.llama(7, vocab_size=vocab_size, initializer_range=0.12)
    prompt = torch.tensor([[1, 3, 2]])
    texts = torch.cartesian_prod(*[torch.arange(vocab_size)] * 3)
    with torch.no_grad():
        whole = torch.cat([prompt.expand(len(texts), 3), texts], dim=1)
        odds = model(input_ids=whole).logits[:, 2:5].double().softmax(-1)
    exact = odds.gather(2, texts[:, :, None]).squeeze(2).prod(1)

    torch.manual_seed(123)
    drafter, stats = tr.make_drafter("published", k=4, tree="0 1 2 00 01 10"), tr.Stats()
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(runs):
        steps = tr.stream(model, prompt, drafter, do_sample=True, max_new_tokens=3, stats=stats)
        seen[tuple(token for step in steps for token in step.tokens)] += 1
    assert stats.mat > 1.5

    assert fit(seen, texts, exact, least=15) > 0.001
