"""Prompts that are read in several pieces, alone, in batches of unequal lengths and behind a cached beginning.

The reference is plain `generate`: token ids, and the logits of every token, which show a piece that was written or
masked at the wrong place even where the most probable token stays the same.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.architectures import SUPPORTED, model_of
from transformers import DynamicCache

import token_recycling as tr

NEW, VOCABULARY = 6, 64
FAMILIES = {str(case): case for case in SUPPORTED}
LENGTHS = st.one_of(st.sampled_from([1, 2, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1024, 1025]), st.integers(1, 1300))
HOW = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
OUTPUTS = {"return_dict_in_generate": True, "output_logits": True}


def models(family):
    """A random model that reads long prompts, twice."""
    if family == "llama":
        return [tiny.llama(seed=5, max_position_embeddings=4096) for _ in range(2)]
    return [model_of(FAMILIES[family]) for _ in range(2)]


def batch(prompts):
    """Prompts (n,) of a batch, padded on the left: ids and mask."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(outputs, reference):
    assert outputs.sequences.tolist() == reference.sequences.tolist()
    for step, expected in zip(outputs.logits, reference.logits, strict=True):
        torch.testing.assert_close(step, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "mistral window of 8", "gemma2 window of 8"])
@settings(max_examples=8)
@given(lengths=st.lists(LENGTHS, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_tokens_and_logits_after_long_prompts_are_those_of_generate(family, lengths, seed):
    model, accelerated = models(family)
    tr.accelerate(accelerated)
    prompts = [tiny.prompt(seed + row, length, VOCABULARY)[0].tolist() for row, length in enumerate(lengths)]
    assert_same(
        accelerated.generate(**batch(prompts), **HOW, **OUTPUTS), model.generate(**batch(prompts), **HOW, **OUTPUTS)
    )


@settings(max_examples=8)
@given(cached=LENGTHS, further=LENGTHS, seed=st.integers(0, 99))
def test_a_long_prompt_behind_a_cached_beginning_is_read_where_it_belongs(cached, further, seed):
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
