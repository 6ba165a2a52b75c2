"""Whatever a drafter proposes, the text is that of `model.generate`: every registered drafter, found by its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import tiny
from support.drafters import example
from support.elsewhere import THERE, another_device, put_there
from transformers import LlamaForCausalLM

import token_recycling as tr


@pytest.mark.parametrize("name", tr.drafter_names())
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 20}], ids=["greedy", "sampled"]
)
def test_the_text_is_that_of_generate(
    model: LlamaForCausalLM, name: str, sampling: dict[str, object], tmp_path: Path
) -> None:
    """Prompts repeat themselves, so that something can be found, and come twice, so that it can be remembered."""
    drafter = example(name, model, tmp_path)
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
def test_every_text_of_a_batch_is_that_of_generate(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    """Texts of different lengths that repeat themselves and may end early."""
    drafter = example(name, model, tmp_path)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = [5, 11, 23]
    for seed in range(3):
        rows = [tiny.prompt(10 * seed + row, 3 + row)[0].repeat(3) for row in range(3)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
        arguments = {"attention_mask": (ids > 0).long(), "max_new_tokens": 20}
        wanted = model.generate(ids, **arguments)
        stats = tr.Stats()
        assert torch.equal(tr.generate(model, ids, drafter=drafter, stats=stats, **arguments), wanted)
        assert stats.steps


@pytest.mark.parametrize("name", tr.drafter_names())
def test_a_drafter_says_in_one_line_what_it_does(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    drafter, stats = example(name, model, tmp_path), tr.Stats()
    tr.generate(model, tiny.prompt(0, 5), drafter=drafter, stats=stats, max_new_tokens=4)
    assert stats.drafter.startswith(name)
    assert "\n" not in stats.drafter


@pytest.mark.parametrize("name", tr.drafter_names())
def test_the_model_may_be_on_another_device(model: LlamaForCausalLM, name: str, tmp_path: Path) -> None:
    """Than the prompt; drafts are where the model is, on a stand-in for such a device."""
    drafter = example(name, model, tmp_path)
    prompt = tiny.prompt(0, 6).repeat(1, 3)
    wanted = model.generate(prompt, max_new_tokens=12)
    with another_device():
        put_there(model)
        for device in (torch.device("cpu"), THERE):
            ours = tr.generate(model, prompt.to(device), drafter=drafter, max_new_tokens=12)
            assert ours.device == device
            assert torch.equal(ours.cpu(), wanted)


@pytest.mark.parametrize("name", tr.drafter_names())
def test_a_fork_knows_what_was_learned_before_and_nothing_later(
    model: LlamaForCausalLM, name: str, tmp_path: Path
) -> None:
    def drafts(drafter: tr.Drafter) -> list[tuple[tuple[int, ...], list[int]]]:
        steps = tr.stream(model, tiny.prompt(0, 6).repeat(1, 3), drafter, max_new_tokens=24)
        return [(step.draft.tree.parents, step.draft.tokens.tolist()) for step in steps]

    drafter = example(name, model, tmp_path)
    drafts(drafter)
    wanted = drafts(drafter.fork())
    for learning in (drafter.fork(), drafter.fork()):
        for seed in range(4):
            prompt = tiny.prompt(0, 6).repeat(1, 3) if seed == 3 else tiny.prompt(seed, 9)
            tr.generate(model, prompt, drafter=learning, max_new_tokens=24)
    assert drafts(drafter.fork()) == wanted
    assert drafts(drafter) == wanted
