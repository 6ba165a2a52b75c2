"""Outputs of mlx-lm with and without drafts, for each family; `nox -s mlx` runs this in its own environment."""

import itertools

import numpy as np
import pytest
from support import tiny

pytest.importorskip("mlx_lm", reason="mlx-lm has an environment of its own: nox -s mlx")

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache, trim_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from support.mlx_models import KEYS_AND_VALUES, ROTATING, STATES, TOKENIZER, VOCABULARY, made

from token_recycling.engines.mlx import TokenRecycling, layers_of, stream_generate

mx.set_default_device(mx.cpu)
LENGTH = 40
FAMILIES = [*KEYS_AND_VALUES, *ROTATING, *STATES]


@pytest.fixture(scope="module")
def llama():
    return made("llama")


def prompts(number, shortest=3, longest=40):
    lengths = [shortest + seed * 37 % (longest - shortest + 1) for seed in range(number)]
    return [tiny.prompt(seed, length, VOCABULARY)[0].tolist() for seed, length in enumerate(lengths)]


def always_drafting():
    """A drafter that drafts the maximum at any cost."""
    return TokenRecycling(token_cost=0.0, memory=0.1, history=4096)


def plain(model, prompt, max_tokens=LENGTH, **options):
    return list(mlx_lm.stream_generate(model, TOKENIZER, prompt, max_tokens, **options))


def accelerated(model, prompt, max_tokens=LENGTH, **options):
    return list(stream_generate(model, TOKENIZER, prompt, max_tokens, **options))


def assert_same(wanted, found):
    for field in ("text", "token", "prompt_tokens", "generation_tokens", "finish_reason"):
        assert [getattr(one, field) for one in found] == [getattr(one, field) for one in wanted], field
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-4)


def count_drafted(said):
    return sum(one.from_draft for one in said)


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_probabilities_and_cache_equal_those_of_mlx_lm(family):
    model, draft, accepted = made(family), always_drafting(), 0
    for prompt in prompts(3):
        caches = make_prompt_cache(model), make_prompt_cache(model)
        wanted = plain(model, prompt, prompt_cache=caches[0])
        found = accelerated(model, prompt, prompt_cache=caches[1], draft_model=draft)
        assert_same(wanted, found)
        goes_on = [plain(model, [5, 6], 10, prompt_cache=cache) for cache in caches]
        assert_same(*goes_on)
        accepted += count_drafted(found)
    assert accepted


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "recurrent_gemma"])
@pytest.mark.parametrize("length", [1, 2, 9, 23])
def test_closed_stream_leaves_the_cache_at_its_last_token(family, length):
    model, draft, (prompt,) = made(family), always_drafting(), prompts(1, 20, 20)
    accelerated(model, prompt, draft_model=draft)  # so that whole outputs are drafted
    caches = make_prompt_cache(model), make_prompt_cache(model)
    for stream, cache in ((mlx_lm.stream_generate, caches[0]), (stream_generate, caches[1])):
        options = {"draft_model": draft} if stream is stream_generate else {}
        answers = stream(model, TOKENIZER, prompt, LENGTH, prompt_cache=cache, **options)
        said = list(itertools.islice(answers, length))
        answers.close()
    assert length < 9 or count_drafted(said)
    assert_same(*[plain(model, [5, 6], 10, prompt_cache=cache) for cache in caches])


def test_fewer_forward_passes_than_tokens(llama, monkeypatch):
    sizes, call = [], type(llama).__call__

    def counting(self, inputs, *args, **kwargs):
        sizes.append(inputs.shape[1])
        return call(self, inputs, *args, **kwargs)

    monkeypatch.setattr(type(llama), "__call__", counting)
    draft, said = always_drafting(), []
    for prompt in prompts(8, 2, 2):
        said += accelerated(llama, prompt, draft_model=draft)
    passes = len(sizes) - 2 * 8
    # One forward pass for every token that was not drafted, except the first of an output.
    assert passes == len(said) - count_drafted(said)
    assert passes < len(said) / 1.4


SAMPLERS = {
    "temperature": {"temp": 0.8},
    "top-p": {"temp": 1.0, "top_p": 0.8},
    "top-k and min-p": {"temp": 0.7, "top_k": 20, "min_p": 0.05},
    "xtc": {"temp": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.05},
}


@pytest.mark.parametrize("sampling", SAMPLERS.values(), ids=SAMPLERS)
def test_seeded_samples_equal_those_of_mlx_lm(llama, sampling):
    draft, accepted = always_drafting(), 0
    for seed, prompt in enumerate(prompts(3)):
        mx.random.seed(seed)
        wanted = plain(llama, prompt, sampler=make_sampler(**sampling))
        mx.random.seed(seed)
        found = accelerated(llama, prompt, sampler=make_sampler(**sampling), draft_model=draft)
        assert_same(wanted, found)
        accepted += count_drafted(found)
    assert accepted


def test_samplers_and_processors_are_called_like_in_mlx_lm(llama):
    """Once for every token, in order, with all tokens before it: they may have state."""
    seen = []

    def processor(tokens, logits):
        seen.append((tokens.tolist(), logits.shape))
        return logits if len(seen) % 3 else -logits

    def sampler(logprobs):
        seen.append(([], logprobs.shape))
        return mx.argmax(logprobs, axis=-1)

    draft, (prompt,), calls = always_drafting(), prompts(1, 20, 20), []
    accelerated(llama, prompt, draft_model=draft)
    for run, options in ((plain, {}), (accelerated, {"draft_model": draft})):
        said = run(llama, prompt, sampler=sampler, logits_processors=[processor], **options)
        calls.append(([one.token for one in said], seen))
        seen = []
    assert calls[0] == calls[1]
    assert count_drafted(said)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 17])
def test_output_ends_at_max_tokens(llama, max_tokens):
    draft, (prompt,) = always_drafting(), prompts(1)
    whole = accelerated(llama, prompt, draft_model=draft)
    caches = make_prompt_cache(llama), make_prompt_cache(llama)
    wanted = plain(llama, prompt, max_tokens, prompt_cache=caches[0])
    assert_same(wanted, accelerated(llama, prompt, max_tokens, draft_model=draft, prompt_cache=caches[1]))
    assert [layer.offset for layer in caches[0]] == [layer.offset for layer in caches[1]]
    endless = stream_generate(llama, TOKENIZER, prompt, -1, draft_model=draft)
    assert [one.token for one in itertools.islice(endless, LENGTH)] == [one.token for one in whole]


def test_output_ends_at_the_end_of_sequence_within_a_draft(llama):
    draft, (prompt,) = always_drafting(), prompts(1)
    accelerated(llama, prompt, draft_model=draft)
    whole = accelerated(llama, prompt, draft_model=draft)
    inside = next(place for place in range(10, LENGTH - 1) if whole[place].from_draft and whole[place + 1].from_draft)
    first = [one.token for one in whole].index(whole[inside].token)
    tokenizer = TokenizerWrapper(TOKENIZER, eos_token_ids=[whole[inside].token])
    caches = make_prompt_cache(llama), make_prompt_cache(llama)
    wanted = list(mlx_lm.stream_generate(llama, tokenizer, prompt, LENGTH, prompt_cache=caches[0]))
    found = list(stream_generate(llama, tokenizer, prompt, LENGTH, draft_model=draft, prompt_cache=caches[1]))
    assert_same(wanted, found)
    assert len(found) == first + 1
    assert found[-1].finish_reason == "stop"
    assert_same(*[plain(llama, [5, 6], 10, prompt_cache=cache) for cache in caches])


@pytest.mark.parametrize("start", [0, 30])
def test_kv_cache_is_quantized_at_the_same_position_as_in_mlx_lm(start):
    model, draft, accepted = made("llama", hidden_size=128, head_dim=32), always_drafting(), 0
    for prompt in 2 * prompts(2):
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
        caches = make_prompt_cache(model), make_prompt_cache(model)
        wanted = plain(model, prompt, prompt_cache=caches[0], **options)
        found = accelerated(model, prompt, prompt_cache=caches[1], draft_model=draft, **options)
        assert_same(wanted, found)
        assert [type(layer) for layer in caches[0]] == [type(layer) for layer in caches[1]]
        accepted += count_drafted(found)
    assert accepted


def test_limited_cache_that_keeps_its_beginning():
    """Drafting stops when the cache is full: it then evicts other tokens than with single-token forward passes."""
    model, draft, accepted = made("qwen3"), always_drafting(), 0
    for prompt in prompts(3):
        found = accelerated(model, prompt, max_kv_size=24, draft_model=draft)
        assert_same(plain(model, prompt, max_kv_size=24), found)
        accepted += count_drafted(found)
        assert not count_drafted(found[max(1, 24 - len(prompt)) :])
    assert accepted


@pytest.mark.parametrize("family", ROTATING)
def test_rotating_cache_keeps_its_size_with_long_drafts(family):
    """mlx-lm issue 1914: forward passes of several tokens evict old keys like a pass of one token."""
    model, draft, (prompt,) = made(family), always_drafting(), prompts(1, 20, 20)
    accelerated(model, prompt, 150, draft_model=draft)  # so that the whole output is drafted
    cache = make_prompt_cache(model)
    rotating = [layer for layer in layers_of(cache) if isinstance(layer, RotatingKVCache)]
    assert rotating
    answers, accepted = stream_generate(model, TOKENIZER, prompt, 150, prompt_cache=cache, draft_model=draft), 0
    for answer in answers:
        accepted += answer.from_draft
        assert all(layer.keys.shape[2] < layer.max_size + 1 + TokenRecycling.most for layer in rotating)
    assert accepted > 3 * TokenRecycling.most


def test_quantized_weights():
    model, draft, accepted = made("llama", hidden_size=128, intermediate_size=128), always_drafting(), 0
    nn.quantize(model, group_size=32, bits=4)
    for prompt in prompts(3):
        found = accelerated(model, prompt, draft_model=draft)
        assert_same(plain(model, prompt), found)
        accepted += count_drafted(found)
    assert accepted


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_16_bit_outputs_on_a_cpu(dtype):
    """On devices whose product of several rows is computed in the same order as that of one row."""
    model, draft = made("gemma3_text"), always_drafting()
    model.set_dtype(dtype)
    for prompt in prompts(3):
        assert [one.token for one in accelerated(model, prompt, draft_model=draft)] == [
            one.token for one in plain(model, prompt)
        ]


def test_conversation_in_one_cache(llama):
    """Each turn has only its new tokens and part of the cache is trimmed in between, as users of mlx-lm do."""
    draft, caches = always_drafting(), (make_prompt_cache(llama), make_prompt_cache(llama))
    for turn, prompt in enumerate(prompts(5)):
        wanted = plain(llama, prompt, 20, prompt_cache=caches[0])
        assert_same(wanted, accelerated(llama, prompt, 20, prompt_cache=caches[1], draft_model=draft))
        for cache in caches:
            trim_prompt_cache(cache, turn)


def test_prompts_as_embeddings():
    model, draft, (prompt,) = made("qwen3"), always_drafting(), prompts(1)
    tokens = mx.array(prompt)
    embeddings = model.model.embed_tokens(tokens)
    for given in (tokens, mx.array([], mx.int32)):
        wanted = plain(model, given, input_embeddings=embeddings)
        assert_same(wanted, accelerated(model, given, input_embeddings=embeddings, draft_model=draft))
