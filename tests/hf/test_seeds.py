"""Random numbers of calls: equal calls at one seed return the same output whatever is drafted, in batches too."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, product

import pytest
import torch
from support import tiny
from support.batches import EOS, batch
from support.cases import paired, thinned

import token_recycling as tr
from token_recycling import Context, Draft, Drafter
from token_recycling.drafters.draft_model import DraftModel
from token_recycling.serving.decoding_thread import DecodingThread

SAMPLING = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 12, "pad_token_id": 0}
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
    """Drafters of several kinds. Each learns from call to call, so calls hardly ever draft alike."""
    return [
        *(tr.make_drafter(f"recycling:tree={size}") for size in ("auto", 40)),
        *map(tr.make_drafter, ("plain", "published")),
        DraftModel(tiny.related(model), nodes=6),
        DraftModel(tiny.related(model, 0.1), mode="sequence", depth=3),
    ]


@pytest.mark.parametrize("name", thinned(CALLS, kept=("padded prompts that end early", "penalties").__contains__))
def test_seeded_output_does_not_depend_on_drafts(model, drafters, name):
    texts = {}
    for turn, drafter in enumerate([*drafters, *drafters[:2]]):
        seed = turn // len(drafters)
        output, _ = tiny.seeded(tr.generate, model, drafter=drafter, seed=seed, **CALLS[name])
        expected = texts.setdefault(seed, ids_of(output))
        assert torch.equal(ids_of(output), expected), f"{drafter.describe()}, seed {seed}, turn {turn}"
    assert not torch.equal(*texts.values())


@pytest.mark.parametrize(
    ("name", "drafter"), paired(["prompts", "padded prompts that end early"], ["recycling", "draft_model"])
)
def test_greedy_batches_use_no_random_numbers(model, name, drafter):
    arguments = {**CALLS[name], "do_sample": False, "temperature": None}
    drafter = DraftModel(tiny.related(model), nodes=6, sampled=True) if drafter == "draft_model" else drafter
    before = torch.get_rng_state()
    tr.generate(model, drafter=drafter, **arguments)
    assert torch.equal(torch.get_rng_state(), before)


def test_next_call_uses_other_random_numbers(model):
    torch.manual_seed(0)
    first, second = (tr.generate(model, **CALLS["prompts"]) for _ in range(2))
    assert not torch.equal(first, second)


def test_sequences_of_one_prompt_differ(model):
    torch.manual_seed(0)
    rows = tr.generate(model, **{**CALLS["return sequences"], "num_return_sequences": 8}).tolist()
    assert len({tuple(row) for row in rows}) == 8


@dataclass
class Recording(Drafter):
    """Records the random numbers that each of its drafts uses; their count varies."""

    numbers: list[list[float]] = field(default_factory=list)

    @property
    def traits(self):
        return tr.DrafterTraits(samples=True)

    def draft(self, context: Context) -> Draft:
        taken = torch.rand(2 + len(self.numbers) % 5, generator=context.generator, dtype=torch.float64)
        self.numbers.append(taken.tolist())
        return Draft.chain(context.root)


def test_drafts_do_not_use_random_numbers_of_the_target(model):
    arguments, drafter = {"input_ids": tiny.prompt(0, 6), **SAMPLING}, Recording()
    plain, after = tiny.seeded(model.generate, **arguments)
    ours, state = tiny.seeded(tr.generate, model, drafter=drafter, **arguments)
    assert torch.equal(ours, plain)
    assert torch.equal(state, after)
    together = [tiny.seeded(tr.generate, model, drafter=drafter, **CALLS["prompts"])[0] for _ in range(2)]
    assert torch.equal(*together)


@pytest.mark.parametrize("name", thinned(CALLS, 2))
def test_no_random_number_of_drafts_is_used_twice(model, name):
    """Not in any later step, row or call after one seed."""
    drafter = Recording()
    torch.manual_seed(5)
    for _ in range(3):
        tr.generate(model, drafter=drafter, **CALLS[name])
    numbers = [number for draft in drafter.numbers for number in draft]
    assert len(drafter.numbers) > 40
    assert len(set(numbers)) == len(numbers)


def test_drafts_of_one_sequence_use_consecutive_random_numbers(model):
    """They come from one generator in order: none is skipped, and none is another sequence's."""
    drafters = [Recording(), Recording()]
    for drafter in drafters:
        torch.manual_seed(5)
        tr.generate(model, drafter=drafter, input_ids=tiny.prompt(1, 5), **SAMPLING)
    assert drafters[0].numbers == drafters[1].numbers

    @dataclass
    class AtOnce(Recording):
        """Uses all of its numbers in its first draft."""

        def draft(self, context):
            count = sum(map(len, drafters[0].numbers)) if not self.numbers else 0
            self.numbers.append(torch.rand(count, generator=context.generator, dtype=torch.float64).tolist())
            return Draft.chain(context.root)

    first = AtOnce()
    torch.manual_seed(5)
    tr.generate(model, drafter=first, input_ids=tiny.prompt(1, 5), **SAMPLING)
    assert [*chain(*drafters[0].numbers)] == [*chain(*first.numbers)]


@pytest.mark.parametrize("mode", thinned(["tree", "sequence"], 2))
def test_seeds_of_the_decoding_thread_with_sampled_drafts(model, mode):
    """Neither other users of random numbers nor the rest of the batch change the outputs."""
    drafter = DraftModel(tiny.related(model, 0.05), mode=mode, depth=3, sampled=True)
    how = {"input_ids": tiny.prompt(0, 6), **SAMPLING}
    thread = DecodingThread(model)
    try:
        alone = [thread.model(drafter, seed).generate(**how).tolist() for seed in range(4)]
        assert len(set(map(str, alone))) == 4
        for _ in range(3):
            torch.rand(1)  # unrelated random numbers
            with ThreadPoolExecutor(4) as calls:
                views = [thread.model(drafter, seed) for seed in range(4)]
                together = list(calls.map(lambda view: view.generate(**how).tolist(), views))
            assert together == alone
    finally:
        thread.close()


@pytest.mark.parametrize(
    ("name", "mode"), thinned(product(["return sequences", "padded prompts that end early"], ["sequence", "tree"]))
)
def test_seeded_output_with_sampled_drafts_is_repeatable(model, name, mode):
    drafter = DraftModel(tiny.related(model, 0.05), mode=mode, depth=3, sampled=True)
    first, *others = (tiny.seeded(tr.generate, model, drafter=drafter, **CALLS[name])[0] for _ in range(3))
    assert all(torch.equal(text, first) for text in others)


def test_seed_of_the_decoding_thread_with_several_sequences(model):
    model.generation_config.pad_token_id = 0
    thread, texts = DecodingThread(model), []
    try:
        for size in ("auto", 2, 30) * 2:
            torch.rand(1)  # unrelated random numbers
            drafter = tr.make_drafter(f"recycling:tree={size}")
            texts.append(thread.model(drafter, 7).generate(**CALLS["return sequences"]))
    finally:
        thread.close()
    assert all(torch.equal(text, texts[0]) for text in texts)
    assert len({tuple(row) for row in texts[0].tolist()}) == 3
