"""Prompts that are read in several pieces: alone, in batches of different lengths and after a cached prefix.

The reference is plain `generate`: token ids, and the logits of every token, which reveal a piece that was written or
masked at the wrong position even if the most probable token stays the same.
"""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.architectures import SUPPORTED, model_of
from support.batches import padded
from support.cases import thinned
from support.oracle import Oracle
from transformers import DynamicCache, MistralForCausalLM, StoppingCriteriaList

import token_recycling as tr
from token_recycling.hf.acceleration import Acceleration, view
from token_recycling.loop.request import Hints
from token_recycling.model import prefill
from token_recycling.model.backend import EAGER
from token_recycling.model.prefixes import PrefixCache
from token_recycling.model.support import ready
from token_recycling.serving.decoding_thread import DecodingThread

NEW, VOCABULARY = 6, 64
FAMILIES = {str(case): case for case in SUPPORTED}
LENGTHS = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1024, 1025]), st.integers(1, 1300))
HOW = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
OUTPUTS = {"return_dict_in_generate": True, "output_logits": True}


class AllLogits(tiny.WithAllLogits, MistralForCausalLM):
    """Reads a batch in pieces."""


def models(family):
    """Return two equal random models for long prompts."""
    if family == "llama":
        return [tiny.llama(seed=5, max_position_embeddings=4096) for _ in range(2)]
    name, _, in_pieces = family.partition(", ")
    found = [model_of(FAMILIES[name]) for _ in range(2)]
    for model in found if in_pieces else ():
        model.__class__ = AllLogits
    return found


def assert_same(outputs, reference):
    assert outputs.sequences.tolist() == reference.sequences.tolist()
    for step, expected in zip(outputs.logits, reference.logits, strict=True):
        torch.testing.assert_close(step, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "family", thinned(["mistral window of 8, all logits", "llama", "mistral window of 8", "gemma2 window of 8"])
)
@settings(max_examples=3)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=3), seed=st.integers(0, 99), fast=st.booleans())
def test_tokens_and_logits_after_long_prompts_equal_those_of_generate(family, lengths, seed, fast):
    model, accelerated = models(family)
    tr.accelerate(accelerated, fast=fast and "all logits" not in family)
    prompts = [tiny.prompt(seed + row, length, VOCABULARY)[0] for row, length in enumerate(lengths)]
    assert_same(
        accelerated.generate(**padded(prompts), **HOW, **OUTPUTS), model.generate(**padded(prompts), **HOW, **OUTPUTS)
    )


@pytest.mark.parametrize("family", thinned(["llama", "mistral window of 8", "gemma2 window of 8"], every=2))
@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    further=st.integers(1, 40),
    piece=st.integers(1, 12),
    seed=st.integers(0, 99),
    fast=st.booleans(),
)
def test_pieces_can_have_any_size(family, lengths, further, piece, seed, fast):
    """Small pieces begin near the end, where windows still reveal their errors. A second turn is read after the cached
    tokens of each row, and the first row alone by the decoding thread.
    """
    model, accelerated = models(family)
    tr.accelerate(accelerated, fast=fast)
    inputs = padded([tiny.prompt(seed + row, length, VOCABULARY)[0].tolist() for row, length in enumerate(lengths)])
    turn = torch.cat([tiny.prompt(seed + 7 + row, further, VOCABULARY) for row in range(len(lengths))])
    sizes = {"PIECE": piece * len(lengths), "_EXTENDED_PIECE": piece, "_READ": piece, "_READ_FAR_ON_CPU": piece}
    outputs = []
    with mock.patch.multiple(prefill, **sizes):
        for which in (accelerated, model):
            first = which.generate(**inputs, **HOW, **OUTPUTS)
            ids = torch.cat([first.sequences, turn], dim=1)
            mask = torch.cat([inputs["attention_mask"], torch.ones(len(ids), NEW + further, dtype=torch.long)], dim=1)
            again = {"input_ids": ids, "attention_mask": mask, "past_key_values": first.past_key_values}
            outputs.append((first, which.generate(**again, **HOW, **OUTPUTS)))
        text = ids[:1, max(lengths) - lengths[0] :]
        alone = {"input_ids": text, "attention_mask": torch.ones_like(text)}  # else token 0 would count as padding
        thread = DecodingThread(model)
        try:
            ours = thread.model(tr.make_drafter("recycling:tree=4"), 0).generate(**alone, **HOW, **OUTPUTS)
        finally:
            thread.close()
    for first, second in zip(*outputs, strict=True):
        assert_same(first, second)
    assert_same(ours, model.generate(**alone, **HOW, **OUTPUTS))


@settings(max_examples=8)
@given(cached=LENGTHS, further=LENGTHS, seed=st.integers(0, 99))
def test_long_prompt_after_a_cached_prefix(cached, further, seed):
    model, accelerated = models("llama")
    tr.accelerate(accelerated)
    prompt = tiny.prompt(seed, cached + further, VOCABULARY)
    outputs = []
    for which in (accelerated, model):
        cache = DynamicCache(config=which.config)
        which.generate(prompt[:, :cached], past_key_values=cache, **HOW)
        cache.crop(cached - cache.get_seq_length())
        outputs.append(which.generate(prompt, past_key_values=cache, **HOW, **OUTPUTS))
    assert_same(*outputs)


@settings(max_examples=2)
@given(seed=st.integers(0, 99), further=st.integers(1, 200))
def test_next_turn_of_a_batch_whose_rows_ended_at_different_lengths(seed, further):
    """The row that ended long before the other is padded in the cache; the next turn is read after both."""
    model, accelerated = models("llama")
    tr.accelerate(accelerated)
    prompts = [tiny.prompt(seed + row, length, VOCABULARY)[0] for row, length in enumerate((70, 3))]
    said = model.generate(**padded(prompts), max_new_tokens=90, do_sample=False, pad_token_id=0)[:, 70:].tolist()
    end = next((token for token in said[0][:9] if token and token not in said[1]), said[0][0])
    outputs = []
    for which in (accelerated, model):
        how = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        first = which.generate(**padded(prompts), **how, max_new_tokens=90, eos_token_id=end)
        turn = torch.cat([tiny.prompt(seed + 7 + row, further, VOCABULARY) for row in range(2)])
        ids = torch.cat([first.sequences, turn], dim=1)
        mask = torch.ones_like(ids)
        mask[:, :70] = padded(prompts)["attention_mask"]
        again = {"input_ids": ids, "attention_mask": mask, "past_key_values": first.past_key_values}
        outputs.append(which.generate(**again, **HOW, **OUTPUTS))
    assert_same(*outputs)


@settings(max_examples=4)
@given(lengths=st.lists(LENGTHS, min_size=2, max_size=4), shared=st.integers(0, 900), seed=st.integers(0, 99))
def test_long_prompts_of_concurrent_and_repeated_calls(lengths, shared, seed):
    """Prompts are read in pieces between steps of other calls, and shared prefixes come from the prefix cache of the
    same key.
    """
    model = tiny.llama(seed=5, context=1.0, max_position_embeddings=4096)
    beginning = tiny.prompt(seed, shared, VOCABULARY) if shared else torch.zeros(1, 0, dtype=torch.long)
    prompts = [
        torch.cat([beginning, tiny.prompt(seed + 1 + row, length, VOCABULARY)], dim=1)
        for row, length in enumerate(lengths)
    ]
    how = {**HOW, "max_new_tokens": 12}
    wanted = [model.generate(prompt, **how).tolist() for prompt in prompts]
    thread = DecodingThread(model)
    prefixes = PrefixCache(thread.target, 10**9)
    drafters = [tr.make_drafter("recycling:tree=8") for _ in prompts]

    def decode(row, key):
        view = thread.model(drafters[row], 0, Hints(prefixes.of(key)))
        text = view.generate(prompts[row], **how).tolist()
        return text, view.acceleration.stats.cached_tokens

    try:
        for key in ("", "", "another"):
            known = len(prefixes)
            with ThreadPoolExecutor(len(prompts)) as calls:
                found = list(calls.map(lambda row: decode(row, key), range(len(prompts))))  # noqa: B023
            assert [text for text, _ in found] == wanted
            for (_, cached), prompt in zip(found, prompts, strict=True):
                assert cached < prompt.shape[1]
                if known and not key:
                    assert cached == prompt.shape[1] - 1
        for row in range(len(prompts)):
            assert shared * (row > 0) <= decode(row, "a third")[1] <= (shared + 9) * (row > 0)
    finally:
        thread.close()


@settings(max_examples=5)
@given(length=st.sampled_from([1, 9, 70]), after=st.integers(1, 12), together=st.booleans(), seed=st.integers(0, 99))
def test_prefix_cache_after_a_failed_call(length, after, together, seed):
    """A criterion fails within a step that accepts several nodes of a tree."""
    model, prompt = tiny.llama(seed=5, context=1.0, vocab_size=96), tiny.prompt(seed, length, VOCABULARY)
    how = {"max_new_tokens": 20, "do_sample": False}
    said = model.generate(prompt, **how)
    target = ready(model)
    hints = Hints(PrefixCache(target, 10**9).of(""))

    def failing(ids, scores, **_):
        if ids.shape[1] >= length + after:
            raise InterruptedError
        return False

    thread = DecodingThread(model)

    def accelerated(text):
        drafter = Oracle([text[0]])
        if together:
            return thread.model(drafter, 0, hints)
        return view(model, Acceleration(drafter, EAGER, target, hints=hints))

    try:
        with pytest.raises(InterruptedError):
            accelerated(said).generate(prompt, stopping_criteria=StoppingCriteriaList([failing]), **how)
        for end in (length + after // 2, length + after - 1, length + after, said.shape[1]):
            wanted = model.generate(said[:, :end], **how)
            assert torch.equal(accelerated(wanted).generate(said[:, :end], **how), wanted)
    finally:
        thread.close()
