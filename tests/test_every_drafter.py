"""Whatever a drafter proposes, the text is that of `model.generate`: every registered drafter, found by its name."""

from __future__ import annotations

import pytest
import tiny
import torch
from transformers import LlamaForCausalLM

import token_recycling as tr


@pytest.mark.parametrize("name", tr.drafter_names())
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 20}], ids=["greedy", "sampled"]
)
def test_the_text_is_that_of_generate(model: LlamaForCausalLM, name: str, sampling: dict[str, object]) -> None:
    """Prompts repeat themselves, so that something can be found, and come twice, so that it can be remembered."""
    drafter = tr.make_drafter(name)
    for seed in range(8):
        prompt = tiny.prompt(seed, 6).repeat(1, 3)
        wanted, wanted_state = tiny.seeded(model.generate, prompt, seed=seed, max_new_tokens=24, **sampling)
        for _ in range(2):
            ours, state = tiny.seeded(
                tr.generate, model, prompt, seed=seed, drafter=drafter, max_new_tokens=24, **sampling
            )
            assert torch.equal(ours, wanted)
            assert torch.equal(state, wanted_state)


@pytest.mark.parametrize("name", tr.drafter_names())
def test_a_drafter_says_in_one_line_what_it_does(model: LlamaForCausalLM, name: str) -> None:
    stats = tr.Stats()
    tr.generate(model, tiny.prompt(0, 5), drafter=name, stats=stats, max_new_tokens=4)
    assert stats.drafter.startswith(name)
    assert "\n" not in stats.drafter
