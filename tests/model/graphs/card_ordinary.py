"""Eager steps on a simulated card: few shapes, aligned masks, two copies between host and card per step."""

from collections import Counter
from functools import partial
from itertools import pairwise

import pytest
import torch
from support import tiny
from support.architectures import SUPPORTED, VOCABULARY, chosen, forget, model_of, named
from support.drafters import example
from support.pretend_card import CARD, OnCard, PretendCard
from support.running import Texts
from support.runs import plain
from torch.nn import functional
from transformers import DynamicCache
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper

import token_recycling as tr
from token_recycling.model.frames import ROWS, band_of, rows_of
from token_recycling.model.prefill import piece_of
from token_recycling.model.target import Target

pytestmark = pytest.mark.usefixtures("card_of_torch")

FAMILIES = {"grouped heads": {}, "a key head for each query": {"num_key_value_heads": 4}}


def llama(**options):
    return tiny.llama(num_attention_heads=4, **options)


class Repeating(tr.Drafter):
    """Draft the token before the last one."""

    def draft(self, context):
        return tr.Draft.chain(context.tokens[-2:].flip(0))

    @property
    def traits(self):
        return tr.DrafterTraits(on_host=True)


@pytest.fixture
def attended(monkeypatch):
    """Queries, keys and masks of every attention on the card."""
    seen, attention = [], functional.scaled_dot_product_attention

    def noted(query, key, value, attn_mask=None, **options):
        if isinstance(query, OnCard):
            seen.append((query, key, attn_mask))
        return attention(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("nodes", [8, 16, 32, 64])
def test_greedy_step_copies_twice_and_equals_generate(nodes, options, dtype, attended):
    model, ids = llama(**options).to(dtype), tiny.prompt(0, 30)
    wanted = model.generate(ids, max_new_tokens=16, do_sample=False)[0, 30:].tolist()
    with PretendCard() as card:
        steps = tr.stream(model.to(CARD), ids.to(CARD), f"recycling:tree={nodes}", max_new_tokens=16)
        tokens, before = list(next(steps).tokens), Counter(card.crossed)
        attended.clear()
        for step in steps:
            tokens += step.tokens
            # If the slots of accepted nodes are not consecutive, their indices are copied to the card.
            moves = step.accepted != list(range(len(step.accepted)))
            assert card.crossed - before == {"to card": 1 + moves, "to host": 1}
            before = Counter(card.crossed)
    if dtype == torch.float32:
        assert tokens == wanted
    for query, key, mask in attended:
        assert key.shape[2] == band_of(key.shape[2])
        assert rows_of(query.shape[2] * key.shape[1] // 4) in ROWS
        assert mask.stride(2) % 8 == mask.storage_offset() % 8 == 0


WAITS = {"rest": 1, "lookahead": 2, "medusa": 2, "draft_model": 2, "layer_skip": 2, "eagle": 4}
"""Copies to the host in a step: one of the step itself, one of each of the drafter's passes."""


@pytest.mark.parametrize("name", WAITS)
def test_drafter_waits_for_the_card_once_for_each_of_its_passes(name, tmp_path):
    model, ids, waits = llama(), tiny.prompt(0, 40).repeat(1, 2), []
    drafter = example(name, model, tmp_path)
    if name in ("draft_model", "layer_skip"):
        drafter.nodes = 8  # also where a draft cannot pay
    wanted = model.generate(ids, max_new_tokens=24, do_sample=False)[0, 80:].tolist()
    with PretendCard() as card:
        steps, tokens = tr.stream(model.to(CARD), ids.to(CARD), drafter, max_new_tokens=24), []
        for step in steps:
            tokens += step.tokens
            waits.append(card.crossed["to host"] + card.crossed["read"])
    assert tokens == wanted
    assert max(later - earlier for earlier, later in pairwise(waits)) == WAITS[name]


GREEDY = {"max_new_tokens": 20, "do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9}


def test_seeded_sampled_step_copies_twice_and_equals_generate():
    model, ids, each = llama(), tiny.prompt(0, 12), []

    class Counted(Repeating):
        def draft(self, context):
            each.append(Counter(card.crossed))
            return super().draft(context)

    wanted, left = tiny.seeded(model.generate, ids, max_new_tokens=24, **SAMPLED)
    with PretendCard() as card:
        how = {"drafter": Counted(), "max_new_tokens": 24, **SAMPLED}
        ours, left_by_us = tiny.seeded(tr.generate, model.to(CARD), ids.to(CARD), **how)
        ours = ours.cpu()
    assert torch.equal(ours, wanted)
    assert torch.equal(left, left_by_us)
    assert len(each) > 5
    for earlier, later in pairwise(each[1:]):
        assert later - earlier == {"to card": 1, "to host": 1}


@pytest.mark.parametrize("kept", [["scores"], ["logits"], ["scores", "logits"]], ids=str)
def test_scores_of_a_seeded_call_equal_generate(kept):
    model, ids = llama(), tiny.prompt(0, 12)
    how = {"max_new_tokens": 8, "return_dict_in_generate": True, **SAMPLED, **{f"output_{name}": True for name in kept}}
    wanted, _ = tiny.seeded(model.generate, ids, **how)
    with PretendCard():
        ours, _ = tiny.seeded(tr.generate, model.to(CARD), ids.to(CARD), drafter=Repeating(), **how)
        found = {name: torch.stack([row.cpu() for row in ours[name]]) for name in kept}
    for name in kept:
        torch.testing.assert_close(found[name], torch.stack(wanted[name]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
def test_batch_copies_twice_per_step(way):
    model, ids = llama(), torch.cat([tiny.prompt(seed, 12) for seed in range(3)])
    wanted = model.generate(ids, max_new_tokens=20, do_sample=False)
    with PretendCard() as card:
        seen = []

        class Counted(Repeating):
            def draft(self, context):
                seen.append(Counter(card.crossed))
                return super().draft(context)

        ours = tr.generate(model.to(CARD), ids.to(CARD), drafter=Counted(), max_new_tokens=20, **way).cpu()
    assert way["do_sample"] or torch.equal(ours, wanted)
    firsts = seen[3::3]
    assert len(firsts) > 5
    for earlier, later in pairwise(firsts):
        assert later - earlier == {"to card": 1, "to host": 1}


def test_running_batch_copies_twice_per_step_and_equals_generate():
    """As in the server: greedy requests next to sampled ones, each with its own generator."""
    model, prompts = llama(), [tiny.prompt(seed, 12) for seed in range(3)]
    warpers = [TemperatureLogitsWarper(0.8), TopKLogitsWarper(9)]
    wanted = []
    for seed, ids in enumerate(prompts):
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": 0.8, "top_k": 9} if seed else {}
        wanted.append(plain(model, ids, 20, **how))
    with PretendCard() as card:
        running, crossed = Texts(model.to(CARD)), []
        for seed, ids in enumerate(prompts):
            running.join(ids, 20, Repeating(), seed or None, warpers if seed else [])
        running.step()
        while len(running.batch.requests) == 3:
            before = Counter(card.crossed)
            running.step()
            crossed.append(card.crossed - before)
        running.finish()
    assert list(running.outputs.values()) == wanted
    assert len(crossed) > 5
    assert all(one == {"to card": 1, "to host": 1} for one in crossed)


def test_running_batch_continues_after_a_processor_fails():
    model, prompts, warper = llama(), [tiny.prompt(seed, 12) for seed in range(3)], TemperatureLogitsWarper(0.8)
    wanted = [plain(model, ids, 12) for ids in prompts]
    with PretendCard():
        running = Texts(model.to(CARD))
        first, failed, last = (
            running.join(ids, 12, Repeating(), seed, [warper] if seed else [])
            for ids, seed in zip(prompts, (None, 1, None), strict=True)
        )
        running.step()
        warper.temperature = None
        running.finish()
    assert [running.outputs[first], running.outputs[last]] == [wanted[0], wanted[2]]
    assert isinstance(failed.error, TypeError)


@pytest.mark.parametrize("more", [0, 3])
def test_sliding_window_cache_of_generate_is_continued(more):
    """Layers of transformers have dropped more slots than ours would have."""
    model = tiny.windowed()
    wanted = model.generate(**tiny.continued(model, more), **GREEDY)
    with PretendCard():
        model.to(CARD)
        ours = tr.generate(model, **tiny.continued(model, more), drafter="recycling:tree=16", **GREEDY).cpu()
    assert torch.equal(ours, wanted)


def test_windows_counted_in_slots_equal_generate():
    """Masked slots after the sequence would shift them."""
    model, ids = model_of(named("gpt_neo")), tiny.prompt(0, 40, VOCABULARY)
    wanted = model.generate(ids, **GREEDY)
    with PretendCard():
        ours = tr.generate(model.to(CARD), ids.to(CARD), drafter="recycling:tree=16", **GREEDY).cpu()
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize("case", chosen(SUPPORTED))
def test_every_family_equals_generate(case):
    """Short and long sequences, and one that continues in a cache."""
    model = model_of(case)
    if getattr(model.config, "num_local_experts", None):
        model.set_experts_implementation("eager")  # the simulated card supports it

    def calls(generate, device):
        tokens = generate(tiny.prompt(0, 5, VOCABULARY).to(device), **GREEDY)
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        for seed in (1, 2):
            tokens = torch.cat([tokens, tiny.prompt(seed, 20, VOCABULARY).to(device)], dim=1)
            given = {"attention_mask": torch.ones_like(tokens), "past_key_values": cache}
            tokens = generate(tokens, **given, **GREEDY)
        return tokens.cpu()

    wanted = calls(model.generate, "cpu")
    forget(model)
    with PretendCard():
        drafter = tr.make_drafter("recycling:tree=16")
        assert torch.equal(calls(partial(tr.generate, model.to(CARD), drafter=drafter), CARD), wanted)


def test_many_steps_use_few_shapes(attended):
    model, shapes = llama(num_hidden_layers=1, max_position_embeddings=2048), set()
    with PretendCard():
        stream = tr.stream(
            model.to(CARD), tiny.prompt(0, 40).to(CARD), "recycling", max_new_tokens=1500, do_sample=True
        )
        next(stream)  # reads the prompt
        attended.clear()
        for _, _ in zip(range(500), stream, strict=False):
            shapes |= {(query.shape[2], key.shape[2]) for query, key, _ in attended}
            attended.clear()
    assert 1 < len(shapes) <= 12


def test_masks_of_a_prompt_with_a_draft_are_aligned():
    with PretendCard():
        target = Target(llama().to(CARD))
        for length in (3, 8, 13):
            draft = tr.Draft(range(3), [-1, 0, 0])
            mask = target.inputs.of_prompt(torch.arange(length, device=CARD), draft, 5).mask
            assert mask.stride(2) % 8 == mask.storage_offset() == 0
            assert mask.shape[3] == 5 + length + 3


def test_prompts_are_read_in_large_pieces_unless_others_wait():
    target = Target(llama())
    on_host = piece_of(target, 0), piece_of(target, 5000)
    target.device = CARD
    assert piece_of(target, 0) >= 4096 > piece_of(target, 0, others=True) > max(on_host)
