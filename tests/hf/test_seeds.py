"""Random numbers of calls: equal seeded calls are equal whatever was drafted, batches included."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support import tiny
from support.batches import EOS, batch

import token_recycling as tr
from token_recycling import Context, Draft, Drafter
from token_recycling.drafters.draft_model import DraftModel
from token_recycling.hf.batched import DecodingThread

SAMPLING = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 16, "pad_token_id": 0}
CALLS = {
    "return sequences": {"input_ids": tiny.prompt(0, 4).repeat(1, 2), "num_return_sequences": 3, **SAMPLING},
    "prompts": {"input_ids": torch.cat([tiny.prompt(seed, 6) for seed in range(3)]), **SAMPLING},
    "padded prompts that end early": {**batch([4, 9, 5], 1), "eos_token_id": EOS, **SAMPLING},
    "scores and caches": {
        "input_ids": tiny.prompt(0, 6),
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
        **SAMPLING,
    },
    "penalties": {"input_ids": tiny.prompt(1, 5), "num_return_sequences": 2, "repetition_penalty": 1.3, **SAMPLING},
}


def ids_of(output):
    return output if isinstance(output, torch.Tensor) else output.sequences


@pytest.fixture
def drafters(model):
    """Of several kinds; each learns from call to call, so that hardly two calls draft alike."""
    return [
        *(tr.make_drafter(f"recycling:tree={size}") for size in ("auto", 2, 7, 40)),
        *map(tr.make_drafter, ("plain", "prompt_lookup", "lookahead", "published", "suffix")),
        DraftModel(tiny.related(model), nodes=6),
        DraftModel(tiny.related(model, 0.1), mode="sequence", depth=3),
    ]


@pytest.mark.parametrize("name", CALLS)
def test_equal_calls_are_equal_whatever_is_drafted(model, drafters, name):
    texts = {}
    for repeat in range(80):
        seed = repeat % 5
        drafter = drafters[(repeat // 5) % len(drafters)]
        output, _ = tiny.seeded(tr.generate, model, drafter=drafter, seed=seed, **CALLS[name])
        expected = texts.setdefault(seed, ids_of(output))
        assert torch.equal(ids_of(output), expected), f"{drafter.describe()}, seed {seed}, repeat {repeat}"
    assert len({str(text.tolist()) for text in texts.values()}) == len(texts)


def test_the_next_call_takes_other_numbers(model):
    torch.manual_seed(0)
    first, second = (tr.generate(model, **CALLS["prompts"]) for _ in range(2))
    assert not torch.equal(first, second)


def test_sequences_of_one_prompt_differ(model):
    torch.manual_seed(0)
    rows = tr.generate(model, **{**CALLS["return sequences"], "num_return_sequences": 8}).tolist()
    assert len({tuple(row) for row in rows}) == 8


@dataclass
class Wasteful(Drafter):
    """Samples as much as it likes, and drafts nothing."""

    numbers: int = 100

    @property
    def traits(self):
        return tr.DrafterTraits(samples=True)

    def draft(self, context: Context) -> Draft:
        torch.rand(self.numbers, generator=context.generator)
        self.numbers += 1
        return Draft.chain(context.root)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_of_drafts_are_no_numbers_of_the_target(model, seed):
    arguments = {"input_ids": tiny.prompt(0, 6), **SAMPLING}
    plain, after = tiny.seeded(model.generate, seed=seed, **arguments)
    ours, state = tiny.seeded(tr.generate, model, drafter=Wasteful(), seed=seed, **arguments)
    assert torch.equal(ours, plain)
    assert torch.equal(state, after)
    drafter = Wasteful()
    together = [tiny.seeded(tr.generate, model, drafter=drafter, seed=seed, **CALLS["prompts"])[0] for _ in range(3)]
    assert all(torch.equal(text, together[0]) for text in together)


@pytest.mark.parametrize("mode", ["sequence", "tree"])
@pytest.mark.parametrize("name", ["return sequences", "padded prompts that end early"])
def test_equal_calls_with_sampled_drafts_are_equal(model, name, mode):
    drafter = DraftModel(tiny.related(model, 0.05), mode=mode, depth=3, sampled=True)
    for seed in range(3):
        texts = [tiny.seeded(tr.generate, model, drafter=drafter, seed=seed, **CALLS[name])[0] for _ in range(10)]
        assert all(torch.equal(text, texts[0]) for text in texts)


def test_a_seed_of_the_decoding_thread_holds_for_several_sequences(model):
    model.generation_config.pad_token_id = 0
    thread, texts = DecodingThread(model), []
    try:
        for size in ("auto", 2, 30) * 6:
            torch.rand(1)  # nobody's numbers
            drafter = tr.make_drafter(f"recycling:tree={size}")
            texts.append(thread.model(drafter, 7).generate(**CALLS["return sequences"]))
    finally:
        thread.close()
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert len({tuple(row) for row in texts[0].tolist()}) == 3
