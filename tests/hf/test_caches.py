"""Dynamic and static caches, requested by an option or passed by the caller. Outputs equal those of a cold cache, and a
call leaves the same contents in a cache as plain `generate`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support import tiny
from support.architectures import BORDERS, EVERY_RUN, VOCABULARY, model_of, named
from support.batches import batch, next_turn
from support.cases import paired, thinned
from support.further_architectures import BLOCKS
from support.recurrent_architectures import RECURRENT, recurrent
from support.releases import HERE, needs, skip_before
from support.side_by_side import SideBySide
from support.slots import assert_same_slots
from transformers import CompileConfig, DynamicCache, EncoderDecoderCache, StaticCache

import token_recycling as tr

pytestmark = [pytest.mark.core, pytest.mark.falls_back]

GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
SPARSE_STATIC = (5, 22)
"""Before this release, `generate` itself returns another output with a static cache and sparse attention."""
FAMILIES = [
    named("llama"),
    named("mistral", "window of 8"),
    named("llama4_text", "chunks of 8, temperature step at 16"),
    named("deepseek_v3"),
    named("deepseek_v32", "8 keys a query"),
]


def model_of_family(case, kind):
    if kind is StaticCache and case.family == "deepseek_v32":
        skip_before(*SPARSE_STATIC)
    if kind is StaticCache and case.family == "llama4_text":  # its chunked masks ignore static caches before
        skip_before(5, 20)
    return with_ends(model_of(case))


def llama_or_mistral(family):
    """Return a random llama, or a random mistral with a window of 8."""
    return model_of(named(family, "window of 8" * (family == "mistral")))


def with_ends(model):
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, [5, 33]
    return model


def test_requested_static_cache_is_replaced_with_a_warning(model, caplog):
    """The returned cache equals that of `generate`."""
    model.generation_config.pad_token_id = 0
    for inputs in (batch([8], 0), batch([3, 8], 0, spare=1)):
        arguments = {**inputs, **GREEDY, "cache_implementation": "static", "return_dict_in_generate": True}
        wanted = model.generate(**arguments)
        with caplog.at_level(logging.WARNING, logger="token_recycling"), tr.accelerated(model) as acceleration:
            ours = model.generate(**arguments)
        assert acceleration.fallback is None
        assert torch.equal(ours.sequences, wanted.sequences)
        paddings = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
        assert_same_slots(ours.past_key_values, wanted.past_key_values, paddings)
    assert "decode in a dynamic one" in caplog.text


@pytest.mark.parametrize("case", [named("gpt_neo"), named("falcon", "ALiBi")], ids=str)
def test_static_cache_of_a_model_that_counts_empty_slots_falls_back(case):
    """Its windows are those of the last slots of the cache, filled or not, or `generate` fails."""

    def call(model):
        with contextlib.suppress(RuntimeError, ValueError):
            return model.generate(tiny.prompt(0, 5), cache_implementation="static", **GREEDY)

    SideBySide(lambda: model_of(case)).assert_same(call, "counts empty slots")


UNBATCHED = (*BORDERS, BLOCKS)
"""Families whose padded batches fall back to transformers."""
TURNS = [
    *(
        (DynamicCache, case, [5] if case in UNBATCHED else [5, 9, 3])
        for case in (*FAMILIES, named("gemma3_text"), named("gemma3n_text"), BLOCKS)
    ),
    *((StaticCache, case, lengths) for case in FAMILIES for lengths in ([5], [4, 9])),
]


def runs_every_time(turns):
    """Select static caches with batches, or with single sequences for families whose batches fall back."""
    kind, case, lengths = turns
    return str(case) in EVERY_RUN and (kind is DynamicCache or (len(lengths) == 1) == (case in UNBATCHED))


@pytest.mark.parametrize(
    ("kind", "case", "lengths"),
    thinned(
        TURNS,
        kept=runs_every_time,
        ids=lambda turns: f"{turns[0].__name__} {turns[1]} {turns[2]}",
    ),
)
def test_plain_and_accelerated_turns_share_a_cache(kind, case, lengths):
    """Plain and accelerated calls alternate on the caller's cache. Every order leaves the same contents, although the
    caller changes the values between turns.
    """
    model, texts, caches = model_of_family(case, kind), [], []
    for ours in ("", "02", "1"):
        inputs = batch(lengths, 1)
        config = model.config.get_text_config(decoder=True)
        cache = kind(config=config, **({"max_cache_len": 64} if kind is StaticCache else {}))
        paddings = (inputs["attention_mask"] == 0).sum(dim=1).tolist()
        for turn in range(3):
            arguments = {**inputs, **GREEDY, "past_key_values": cache}
            if str(turn) in ours:
                stats = tr.Stats()
                text = tr.generate(model, stats=stats, **arguments)
                assert stats.steps or (case in UNBATCHED and kind is StaticCache)
            else:
                text = model.generate(**arguments)
            assert int(cache.get_seq_length()) == text.shape[1] - 1
            inputs = next_turn(inputs, text, turn, VOCABULARY)
            for layer in cache.layers:
                if layer.values is not None:
                    layer.values.mul_(0.8)
        texts.append(text)
        caches.append(cache)
    assert all(torch.equal(text, texts[0]) for text in texts)
    for cache in caches[1:]:
        assert_same_slots(cache, caches[0], paddings)


def test_static_cache_keeps_its_memory_addresses(model):
    """A model compiled for the cache relies on the addresses."""
    cache, text = StaticCache(config=model.config, max_cache_len=64), tiny.prompt(0, 5)
    text = tr.generate(model, text, past_key_values=cache, **GREEDY)
    before = [layer.keys.data_ptr() for layer in cache.layers]
    tr.generate(model, torch.cat([text, tiny.prompt(1, 2)], dim=1), past_key_values=cache, **GREEDY)
    assert [layer.keys.data_ptr() for layer in cache.layers] == before


def test_static_cache_that_is_too_short_falls_back(model):
    tr.accelerate(model)
    with pytest.raises(Exception, match="index"):
        model.generate(tiny.prompt(0, 5), past_key_values=StaticCache(config=model.config, max_cache_len=13), **GREEDY)
    assert "room for 14 tokens, got 13" in str(model.acceleration.fallback)
    model.generate(tiny.prompt(0, 5), past_key_values=StaticCache(config=model.config, max_cache_len=14), **GREEDY)
    assert model.acceleration.fallback is None


def test_model_is_not_compiled_for_a_static_cache():
    """Plain `generate` compiles it on an accelerator, or on every device if configured to."""
    model, ids = tiny.llama(num_hidden_layers=1), tiny.prompt(0, 8)
    config = CompileConfig(backend="eager", fullgraph=False)
    config._compile_all_devices = True
    arguments = {"cache_implementation": "static", "compile_config": config, **GREEDY, "max_new_tokens": 3}
    wanted = model.generate(ids, **arguments)
    assert hasattr(model, "_compiled_call")
    del model._compiled_call
    assert torch.equal(tr.generate(model, ids, **arguments), wanted)
    assert not hasattr(model, "_compiled_call")


def test_static_cache_beyond_index_topk_falls_back():
    """The index breaks ties by the number of slots, and a static cache has more slots than tokens."""
    skip_before(*SPARSE_STATIC)
    case = named("deepseek_v32")
    model, ids = tr.accelerate(model_of(case)), tiny.prompt(0, 5, VOCABULARY)
    threshold = model.config.index_topk
    for new, reason in ((threshold - 4, None), (threshold - 3, f"up to {threshold} tokens, got {threshold + 2}")):
        held = StaticCache(config=model.config, max_cache_len=2 * threshold)
        ours = model.generate(ids, past_key_values=held, max_new_tokens=new, do_sample=False)
        held = StaticCache(config=model.config, max_cache_len=2 * threshold)
        wanted = model_of(case).generate(ids, past_key_values=held, max_new_tokens=new, do_sample=False)
        assert torch.equal(ours, wanted)
        found = model.acceleration.fallback
        assert found is None if reason is None else reason in found


def test_encoder_decoder_cache_falls_back():
    """GPT-2 also accepts a cache for an encoder and a decoder."""

    def call(model):
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        return model.generate(tiny.prompt(0, 5, VOCABULARY), past_key_values=cache, **GREEDY)

    SideBySide(lambda: model_of(named("gpt2"))).assert_same(call, "EncoderDecoderCache")


CONTINUED = [named("llama"), named("gemma2", "window of 8")]
if HERE >= (5, 14):
    CONTINUED.append(recurrent("qwen3_5_text"))
DRAFTERS = st.sampled_from(["recycling:tree=8", "published", "suffix", "prompt_lookup", "plain"])


@cache
def family(place):
    model = model_of(CONTINUED[place])
    model.generation_config.eos_token_id = None
    return model


class OneCache(RuleBasedStateMachine):
    """One cache continued by plain calls, accelerated calls and abandoned streams, in any order. Every output equals
    that of a cold cache, and the cache holds all tokens except the last.
    """

    @initialize(place=st.integers(0, len(CONTINUED) - 1), length=st.integers(1, 12))
    def begin(self, place, length):
        self.model, self.ids = family(place), tiny.prompt(length, length, VOCABULARY)
        self.fast = [False] if CONTINUED[place] in RECURRENT else [False, True]
        self.cache = DynamicCache(config=self.model.config.get_text_config(decoder=True))

    def call(self, generate, new, **more):
        how = {"attention_mask": torch.ones_like(self.ids), "max_new_tokens": new, "do_sample": False, **more}
        return generate(self.ids, **how)

    def continued(self, wanted, ids):
        assert torch.equal(ids, wanted[:, : ids.shape[1]])
        assert int(self.cache.get_seq_length()) == ids.shape[1] - 1
        self.ids = ids

    @rule(new=st.integers(1, 12))
    def plain(self, new):
        wanted = self.call(self.model.generate, new)
        self.continued(wanted, self.call(self.model.generate, new, past_key_values=self.cache))

    @rule(new=st.integers(1, 12), drafter=DRAFTERS, fast=st.booleans())
    def ours(self, new, drafter, fast):
        wanted, how = self.call(self.model.generate, new), {"drafter": drafter, "fast": fast and self.fast[-1]}
        generate = lambda ids, **given: tr.generate(self.model, ids, **how, **given)  # noqa: E731
        self.continued(wanted, self.call(generate, new, past_key_values=self.cache))

    @rule(steps=st.integers(1, 4), drafter=DRAFTERS, fast=st.booleans())
    def abandoned_stream(self, steps, drafter, fast):
        how = {"max_new_tokens": 40, "past_key_values": self.cache, "fast": fast and self.fast[-1]}
        stream, tokens = tr.stream(self.model, self.ids, drafter, **how), []
        for _, step in zip(range(steps), stream, strict=False):
            tokens += step.tokens
        stream.close()
        wanted = self.call(self.model.generate, len(tokens))
        self.continued(wanted, torch.cat([self.ids, torch.tensor([tokens])], dim=1))

    @rule(tokens=st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=3))
    def append_tokens(self, tokens):
        self.ids = torch.cat([self.ids, torch.tensor([tokens])], dim=1)


OneCache.TestCase.settings = settings(max_examples=8, stateful_step_count=8)
TestOneCache = OneCache.TestCase


def windowed(config, **settings):
    """Return a copy of a configuration whose caches drop tokens."""
    config = copy.deepcopy(config)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(("family", "kind"), paired(["llama", "mistral"], [DynamicCache, StaticCache]))
def test_cache_with_a_shorter_window_than_the_model_falls_back(family, kind):
    """Such as a cache made for another model. Plain `generate` decodes with the remaining tokens."""
    model, ids = llama_or_mistral(family), tiny.prompt(0, 12, VOCABULARY)
    options = {} if kind is DynamicCache else {"max_cache_len": 40}
    short, ours, long = (windowed(model.config, sliding_window=size) for size in (5, 8, 11))
    wanted = model.generate(ids, past_key_values=kind(config=short, **options), **GREEDY)
    tr.accelerate(model)
    assert torch.equal(model.generate(ids, past_key_values=kind(config=short, **options), **GREEDY), wanted)
    assert "the cache keeps 5 tokens" in model.acceleration.fallback
    with pytest.raises(ValueError, match="5 tokens" if kind is DynamicCache else "StaticCache"):
        tr.stream(model, ids, past_key_values=kind(config=short, **options))
    for config in (ours, long):
        model.generate(ids, past_key_values=kind(config=config, **options), **GREEDY)
        assert (model.acceleration.fallback is None) == (family == "mistral")
    model.generate(ids[:, :2], past_key_values=kind(config=short, **options), max_new_tokens=4, do_sample=False)
    assert model.acceleration.fallback is None  # too few tokens for the cache to drop any


def test_stream_accepts_exactly_the_caches_that_generate_accelerates():
    """Whether a windowed cache drops attended tokens depends on the maximum length of the sequence."""
    model, taken = tr.accelerate(model_of(named("llama"))), []
    for length, new in itertools.product(range(2, 8), range(1, 7)):
        ids, config = tiny.prompt(0, length, VOCABULARY), windowed(model.config, sliding_window=6)
        model.generate(ids, past_key_values=DynamicCache(config=config), max_new_tokens=new, do_sample=False)
        taken.append(model.acceleration.fallback is None)
        with contextlib.nullcontext() if taken[-1] else pytest.raises(tr.UnsupportedModelError, match="6 tokens"):
            tr.stream(model, ids, past_key_values=DynamicCache(config=config), max_new_tokens=new)
    assert {*taken} == {True, False}


@pytest.mark.parametrize("setting", [{"sliding_window": 5}, {"attention_chunk_size": 5}])
def test_setting_that_only_the_cache_reads_falls_back(setting):
    """Such as a window in a llama's configuration: the cache drops tokens that the masks still show."""

    def call(model):
        return model.generate(tiny.prompt(0, 12, VOCABULARY), **GREEDY)

    both = SideBySide(lambda: model_of(named("llama")))
    both.assert_same(call)
    both.change(lambda model: setattr(model, "config", windowed(model.config, **setting)))
    both.assert_same(call, next(iter(setting)))


@pytest.mark.parametrize("recording", ["from the start", "after a call"])
@needs(5, 18)  # before, plain `generate` itself fails
def test_cache_cropped_beyond_its_window(recording):
    """The caller crops more tokens than a windowed layer keeps without recording."""
    model, texts = model_of(named("mistral", "window of 8")), []
    model.generation_config.pad_token_id = 0
    ids = tiny.prompt(0, 6, VOCABULARY).repeat(1, 3)
    for generate in (model.generate, tr.accelerate(copy.deepcopy(model)).generate):
        cache = DynamicCache(config=model.config)
        if recording == "from the start":
            cache.activate_past_recording()
        text = generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
        cache.activate_past_recording()
        text = generate(text, past_key_values=cache, max_new_tokens=40, do_sample=False)
        cache.crop(-35)
        left = int(cache.get_seq_length()) + 1
        texts.append(generate(text[:, :left], past_key_values=cache, **GREEDY))
    assert torch.equal(*texts)


def visible_state(layer):
    """Return a layer's class, contiguity and shapes. Layers with a window may have any contiguity."""
    keys = getattr(layer, "keys", None)
    return type(layer), keys is None or layer.is_sliding or keys.is_contiguous(), shapes_in(vars(layer))


def shapes_in(value):
    if isinstance(value, dict):
        return type(value), {name: shapes_in(item) for name, item in value.items()}
    return value.shape if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("how", ["returned", "given", "filled"])
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "mistral", "deepseek_v32"),
        *(pytest.param(hybrid, marks=needs(5, 14)) for hybrid in ("falcon_h1", "bamba")),
    ],
)
def test_returned_layers_equal_those_of_transformers(family, how, rows):
    """So callers can write to them through `.data`, save them, crop them as far as plain `generate`'s, and reset them
    for another model (huggingface/transformers#48509). A plain model continues them.
    """
    cases = {"mistral": named("mistral", "window of 8"), **{case.family: case for case in RECURRENT}}
    model = model_of(cases.get(family) or named(family))
    ids, seen = tiny.prompt(0, 6, VOCABULARY).repeat(rows, 1), []
    given = DynamicCache(config=None if family in ("llama", "mistral") else model.config)
    for generate in (model.generate, tr.accelerate(copy.deepcopy(model)).generate):
        cache = {"returned": None, "given": copy.deepcopy(given)}.get(how, DynamicCache(config=model.config))
        output = generate(ids, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
        seen.append(
            [*map(visible_state, output.past_key_values.layers), output.past_key_values.layer_class_to_replicate]
        )
    assert seen[0] == seen[1]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_stream_leaves_the_same_cache_as_generate(family):
    model, ids = llama_or_mistral(family), tiny.prompt(0, 6, VOCABULARY)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    model.generate(ids, past_key_values=caches[0], **GREEDY)
    for _ in tr.stream(model, ids, past_key_values=caches[1], **GREEDY):
        pass
    assert [*map(visible_state, caches[1].layers)] == [*map(visible_state, caches[0].layers)]
    assert_same_slots(caches[1], caches[0])


@pytest.mark.parametrize(("family", "ended"), paired(["llama", "mistral"], [None, 9, 13]))
def test_batch_without_padding_leaves_the_same_slots_as_generate(family, ended):
    """Rows advance by different numbers of tokens, and beyond the column where a custom criterion ends the batch."""
    model = with_ends(llama_or_mistral(family))
    for seed in range(4):
        ids = torch.cat([tiny.prompt(seed + row, 3, VOCABULARY).repeat(1, 2) for row in range(3)])
        arguments = {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True, **GREEDY}
        if ended is not None:
            arguments["stopping_criteria"] = [lambda ids, scores: torch.full((len(ids),), ids.shape[1] >= ended)]
        wanted = model.generate(ids, **arguments)
        ours = tr.generate(model, ids, **arguments)
        assert torch.equal(ours.sequences, wanted.sequences)
        assert_same_slots(ours.past_key_values, wanted.past_key_values)


@needs(5, 24)
def test_cache_dtypes_under_autocast_equal_those_of_generate():
    """Under autocast rotary embeddings compute keys in float32. Earlier caches widened values to float32."""
    model, ids, types = model_of(named("llama")), tiny.prompt(0, 6, VOCABULARY), []
    for generate in (model.generate, tr.accelerate(copy.deepcopy(model)).generate):
        with torch.autocast("cpu", torch.bfloat16):
            cache = generate(ids, return_dict_in_generate=True, **GREEDY).past_key_values
        types.append([(layer.keys.dtype, layer.values.dtype) for layer in cache.layers])
        cache.update(*torch.rand(2, 1, *cache.layers[0].keys.shape[1:]), layer_idx=0)  # as another model would
        types[-1].append((cache.layers[0].keys.dtype, cache.layers[0].values.dtype))
    assert types[0] == types[1]


def tensors_of(cache):
    """Return the keys and values of every layer."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def copied(cache):
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    return other


@pytest.mark.parametrize(("family", "by_hand"), paired(["llama", "mistral"], [False, True]))
def test_tensors_held_by_the_caller_are_not_overwritten(family, by_hand):
    """Nor are those of copied layers, while the cache is cropped, refilled and restored."""
    model = model_of(named(family))
    ids, more = tiny.prompt(0, 5, VOCABULARY), tiny.prompt(1, 4, VOCABULARY)

    def continue_from(tokens, cache):
        if not by_hand:
            return model.generate(tokens, past_key_values=cache, **GREEDY)
        with torch.no_grad():
            return model(tokens[:, cache.get_seq_length() :], past_key_values=cache).logits

    def turns():
        cache = DynamicCache(config=model.config)
        said = model.generate(ids, past_key_values=cache, **{**GREEDY, "max_new_tokens": 3})
        held, others = tensors_of(cache), [copied(cache), copied(cache)]
        cache.crop(-2)
        answers = [continue_from(torch.cat([said[:, :-3], more], 1), cache)]
        for number, other in enumerate(others):
            answers.append(continue_from(torch.cat([said, more.roll(number, 1)], 1), other))
        for layer, (keys, values) in zip(cache.layers, held, strict=True):
            layer.keys, layer.values = keys, values
        return [*answers, *(states for pair in held for states in pair)]

    wanted = turns()
    tr.accelerate(model)
    for ours, expected in zip(turns(), wanted, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert by_hand or model.acceleration.fallback is None


def with_fewer(cache, layer):
    """Drop two slots of one layer, as manual compression does."""
    kept = cache.layers[layer]
    kept.keys, kept.values = kept.keys[:, :, 2:], kept.values[:, :, 2:]


def with_cleared(cache):
    cache.layers[-1].reset()


def with_one_twice(cache):
    cache.layers[1] = cache.layers[0]


UNEQUAL = {
    "the last layer has fewer tokens": partial(with_fewer, layer=-1),
    "the first layer has fewer tokens": partial(with_fewer, layer=0),
    "the last layer has no tokens": with_cleared,
    "one layer in two places": with_one_twice,
}


@pytest.mark.parametrize(("change", "family"), paired(UNEQUAL, ["llama", "mistral"]))
@needs(5, 23)
def test_layers_with_different_numbers_of_tokens_fall_back(family, change):
    """Plain `generate` attends to the available slots or raises an error."""
    model, ids = llama_or_mistral(family), tiny.prompt(0, 12, VOCABULARY)

    def outcome(generate):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
        UNEQUAL[change](cache)
        try:
            return generate(ids, past_key_values=cache, **GREEDY).tolist()
        except (RuntimeError, IndexError) as error:
            return str(error)

    wanted = outcome(model.generate)
    assert outcome(tr.accelerate(model).generate) == wanted
    assert (
        "of the cache hold different" in model.acceleration.fallback
        or "same layer object" in model.acceleration.fallback
    )


@pytest.mark.parametrize("more", [0, 1])
def test_cache_of_all_tokens_has_the_outcome_of_generate(model, more):
    outcomes = []
    for decoding in (model, tr.accelerate(copy.deepcopy(model))):
        held = DynamicCache()
        decoding(torch.arange(2, 9 + more)[None], past_key_values=held)
        try:
            outcomes.append(decoding.generate(torch.arange(2, 9)[None], past_key_values=held, **GREEDY).tolist())
        except (IndexError, RuntimeError, ValueError) as error:
            outcomes.append(repr(error))
    assert outcomes[0] == outcomes[1]
