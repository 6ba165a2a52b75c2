"""Multimodal models: text-only calls are accelerated, calls with an image fall back to transformers."""

from typing import Any

import pytest
import torch
import transformers
from support import tiny
from support.architectures import attention_settings
from support.batches import batch
from support.further_architectures import TOWER
from support.side_by_side import SideBySide
from support.tiny import sizes
from transformers import DynamicCache

import token_recycling as tr
from token_recycling.model.hidden import layer_states

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
PICTURE = 60
SIZES = sizes(
    "vocab_size=64 hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 num_key_value_heads=2 "
    "head_dim=8 initializer_range=0.3 max_position_embeddings=128 bos_token_id=None eos_token_id=None pad_token_id=None"
)
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}


def gemma3():
    config = transformers.Gemma3Config(
        text_config={**SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config=TOWER,
        mm_tokens_per_image=4,
        image_token_index=PICTURE,
        eos_token_id=None,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def llava():
    config = transformers.LlavaConfig(
        text_config={**SIZES, "model_type": "llama"},
        vision_config={**TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 2, "projection_dim": 16},
        image_token_index=PICTURE,
    )
    return transformers.LlavaForConditionalGeneration(config)


def qwen2_vl():
    """Its positions are triples of numbers, which are equal for text."""
    config = transformers.Qwen2VLConfig(
        text_config={**SIZES, **ROTARY},
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 14},
        image_token_id=PICTURE,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


MODELS = [gemma3, llava, qwen2_vl]


def seeded_model(make):
    torch.manual_seed(0)
    model = make().eval()
    model.generation_config.pad_token_id = 0
    return model


@pytest.mark.parametrize("make", MODELS)
def test_text_only_calls_are_accelerated(make):
    """One sequence, a batch, and turns on one cache."""
    model, ids, inputs = seeded_model(make), tiny.prompt(1, 10, PICTURE), batch([5, 9, 3], 1)
    inputs["input_ids"] %= PICTURE
    assert not tr.check(model).tested, "only models of text are tested families"
    found = []
    for accelerated in (False, True):
        if accelerated:
            tr.accelerate(model, tree="paper")
        texts = [model.generate(ids, **GREEDY), model.generate(**inputs, **GREEDY)]
        cache, text = DynamicCache(config=model.config.get_text_config()), tiny.prompt(0, 6, PICTURE)
        for turn in range(3):
            text = model.generate(text, attention_mask=torch.ones_like(text), past_key_values=cache, **GREEDY)
            assert cache.get_seq_length() == text.shape[1] - 1
            assert not accelerated or model.acceleration.fallback is None
            text = torch.cat([text, tiny.prompt(turn, 3, PICTURE)], dim=1)
        found.append([*texts, text])
    assert model.acceleration.total.tokens >= 7 * GREEDY["max_new_tokens"], "all calls were accelerated"
    assert model.acceleration.total.mat > 1
    assert all(map(torch.equal, *found))


def test_attention_setting_of_each_part_is_preserved():
    model, ids = seeded_model(gemma3), tiny.prompt(0, 14, PICTURE)
    model.set_attn_implementation({"text_config": "sdpa", "vision_config": "eager"})
    own, wanted = attention_settings(model), model.generate(ids, **GREEDY)
    assert len(set(own)) == 2
    tr.accelerate(model)
    assert torch.equal(model.generate(ids, **GREEDY), wanted)
    assert model.acceleration.fallback is None
    assert attention_settings(model) == own
    tr.decelerate(model)
    assert attention_settings(model) == own


def test_hidden_states_are_those_of_the_text_layers():
    """A vision tower with the same number of layers precedes them among the modules."""
    model, ids = seeded_model(llava), tiny.prompt(1, 10, PICTURE)
    with torch.no_grad(), layer_states(model, range(model.config.text_config.num_hidden_layers)) as seen:
        wanted = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(seen[0], torch.cat(wanted[:-1], dim=-1))


@pytest.mark.parametrize(("make", "mark"), [(gemma3, "token_type_ids"), (qwen2_vl, "mm_token_type_ids")])
@pytest.mark.falls_back
def test_token_types_are_accepted_if_all_are_text(make, mark):
    model, ids = seeded_model(make), tiny.prompt(1, 10, PICTURE)
    wanted = model.generate(ids, **{mark: torch.zeros_like(ids)}, **GREEDY)
    tr.accelerate(model)
    assert torch.equal(model.generate(ids, **{mark: torch.zeros_like(ids)}, **GREEDY), wanted)
    assert model.acceleration.fallback is None
    marked = torch.zeros_like(ids).index_fill(1, torch.tensor([3]), 1)
    model.generate(ids, **{mark: marked}, **GREEDY)
    assert model.acceleration.fallback == f"inputs other than token ids are unsupported: {mark}"


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
@pytest.mark.falls_back
def test_every_axis_of_the_positions_must_count_tokens(axis):
    model, ids = seeded_model(qwen2_vl), tiny.prompt(1, 10, PICTURE)
    positions = torch.arange(10).expand(3, 1, 10).clone()
    if axis is not None:
        positions[axis] *= 2
    wanted = model.generate(ids, position_ids=positions, **GREEDY)
    tr.accelerate(model)
    assert torch.equal(model.generate(ids, position_ids=positions, **GREEDY), wanted)
    assert (model.acceleration.fallback is None) == (axis is None)


@pytest.mark.parametrize("make", [gemma3, llava])
@pytest.mark.falls_back
def test_several_axes_of_positions_fail_where_the_model_has_one(make):
    def call(model):
        with pytest.raises((RuntimeError, ValueError)):
            model.generate(tiny.prompt(1, 10, PICTURE), position_ids=torch.arange(10).expand(3, 1, 10), **GREEDY)

    SideBySide(lambda: seeded_model(make)).assert_same(call, "position_ids")


_text = torch.tensor([[5, 9, *[PICTURE] * 4, 7, 11]])
PICTURED = {
    "input_ids": _text,
    "mm_token_type_ids": (_text == PICTURE).int(),
    "pixel_values": torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0)),
    "image_grid_thw": torch.tensor([[1, 4, 4]]),
}


@pytest.mark.falls_back
def test_image_falls_back_to_transformers_without_lasting_effect():
    """Qwen2-VL stores how far an image shifts the positions."""
    model, ids = seeded_model(qwen2_vl), tiny.prompt(1, 10, PICTURE)
    wanted, wanted_alone = model.generate(**PICTURED, **GREEDY), model.generate(ids, **GREEDY)
    tr.accelerate(model)
    assert torch.equal(model.generate(**PICTURED, **GREEDY), wanted)
    assert model.acceleration.fallback.endswith(": an encoded image, mm_token_type_ids")
    assert int(model.model.rope_deltas) != 0
    assert torch.equal(model.generate(ids, **GREEDY), wanted_alone)
    assert model.acceleration.fallback is None


@pytest.mark.falls_back
def test_text_after_a_cached_image_falls_back_to_transformers():
    """Its positions do not count from the start of the sequence."""

    def call(model):
        cache = DynamicCache(config=model.config.get_text_config())
        first = model.generate(**PICTURED, past_key_values=cache, **GREEDY)
        return model.generate(torch.cat([first, tiny.prompt(2, 3, 50)], 1), past_key_values=cache, **GREEDY)

    SideBySide(lambda: seeded_model(qwen2_vl)).assert_same(call, "position_ids")
