"""Inputs that plain `generate` takes or refuses: ours returns the same dtype, or raises the same error."""

from __future__ import annotations

import re

import pytest
import torch
from support import tiny
from support.batches import batch
from support.cases import paired
from support.side_by_side import SideBySide
from transformers import DynamicCache

import token_recycling as tr
from token_recycling._util.text_stream import StepRecorder

IDS = tiny.prompt(0, 6)
WAYS = [{}, {"do_sample": True}, {"eos_token_id": 3}, {"return_dict_in_generate": True}]


def outcome(generate, ids, **arguments):
    torch.manual_seed(0)
    try:
        output = generate(ids, max_new_tokens=4, pad_token_id=0, **arguments)
    except Exception as error:
        return type(error), str(error)
    output = output if isinstance(output, torch.Tensor) else output.sequences
    return output.dtype, output.tolist()


INPUTS = {
    "int64": IDS,
    "int32": IDS.int(),
    "int16": IDS.short(),
    "float": IDS.float(),
    "no rows": IDS[:0],
    "no tokens": IDS[:, :0],
    "neither": IDS[:0, :0],
    "one dimension": IDS[0],
}


@pytest.mark.parametrize(("name", "arguments"), paired(INPUTS, WAYS))
def test_what_plain_returns_or_raises(model, name, arguments):
    expected = outcome(model.generate, INPUTS[name], **arguments)
    assert outcome(tr.accelerate(model).generate, INPUTS[name], **arguments) == expected


def test_int32_of_a_padded_batch(ending):
    inputs = batch([4, 9, 5], 1)
    ids, others = inputs.pop("input_ids").int(), inputs
    expected = outcome(ending.generate, ids, do_sample=False, **others)
    assert outcome(tr.accelerate(ending).generate, ids, do_sample=False, **others) == expected
    assert expected[0] == torch.int64


@pytest.mark.parametrize("lengths", [[6], [300], [4, 9, 300]], ids=str)
def test_positions_of_the_caller_are_those_of_the_tokens_or_left_to_generate(lengths):
    model = tiny.llama(max_position_embeddings=512)
    inputs = {**batch(lengths, 1), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    usual = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    for positions, counted in ((usual, True), (usual + 1, False), (2 * usual, False)):
        expected = model.generate(**inputs, position_ids=positions)
        with tr.accelerated(model) as acceleration:
            assert torch.equal(model.generate(**inputs, position_ids=positions), expected)
        assert (acceleration.fallback is None) == counted
        assert counted or "position_ids" in acceleration.fallback


@pytest.mark.parametrize("spare", [0, 1, 7])
def test_a_recorder_is_given_what_follows_a_padded_prompt(ending, spare):
    recorder, inputs = StepRecorder(), {**batch([6], 0, spare=spare), "max_new_tokens": 12}
    wanted = ending.generate(**inputs)
    assert torch.equal(tr.generate(ending, **inputs, streamer=recorder), wanted)
    assert recorder.tokens == wanted[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("positions", [torch.arange(6)[(None,) * axes] for axes in (0, 2, 3)])
def test_positions_of_another_shape(model, positions):
    expected = outcome(model.generate, IDS, position_ids=positions, do_sample=False)
    assert outcome(tr.accelerate(model).generate, IDS, position_ids=positions, do_sample=False) == expected


@pytest.mark.parametrize("kept", [torch.tensor([0]), torch.tensor([5]), torch.tensor([0, 2, 3]), -1, 0, 2])
def test_places_of_logits(model, kept):
    """Of a prompt: the first token may be chosen by another one than the last."""
    expected = outcome(model.generate, IDS, logits_to_keep=kept, do_sample=False)
    assert outcome(tr.accelerate(model).generate, IDS, logits_to_keep=kept, do_sample=False) == expected


@pytest.mark.parametrize("rows", [[0], [3, 0], [0, 3], [0, 0]], ids=str)
def test_a_row_that_is_all_padding_is_left_to_generate(ending, rows):
    inputs = batch(rows, 1, spare=2)
    ids, others = inputs.pop("input_ids"), inputs
    expected = outcome(ending.generate, ids, do_sample=False, **others)
    assert outcome(tr.accelerate(ending).generate, ids, do_sample=False, **others) == expected
    assert "padding must be on the left" in ending.acceleration.fallback


MASKS = {
    "one row for all": torch.tensor([[0, 0, 1, 1, 1, 1]]),
    "one row of ones for all": torch.ones(1, 6).long(),
    "longer": torch.ones(2, 9).long(),
    "longer, with padding": torch.tensor([[0] * 3 + [1] * 6] * 2),
    "shorter": torch.ones(2, 4).long(),
    "one dimension": torch.ones(6).long(),
    "three dimensions": torch.ones(1, 2, 6).long(),
}


@pytest.mark.parametrize(("name", "rows"), paired(MASKS, [1, 2]))
def test_a_mask_of_another_shape_than_the_tokens(name, rows):
    model, ids, mask = tiny.gpt2().eval(), tiny.prompt(3, 12).reshape(2, 6)[:rows], MASKS[name]
    expected = outcome(model.generate, ids, attention_mask=mask, do_sample=False)
    assert outcome(tr.accelerate(model).generate, ids, attention_mask=mask, do_sample=False) == expected


@pytest.mark.parametrize(
    ("cached", "new", "rows", "reason"),
    [(9, 3, 1, "all tokens"), (5, 12, 1, "count from 0"), (5, 12, 2, "count from 0")],
)
def test_new_tokens_alone_with_a_cache_are_left_to_generate(cached, new, rows, reason):
    """It takes them, fewer or more than the cache holds, where the mask says that those of the cache are not given."""
    mask, text = torch.ones(rows, cached + new).long(), tiny.prompt(3, 2 * (cached + new))

    def call(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text[:, :cached].repeat(rows, 1), past_key_values=cache)
        ids = text[0, cached : cached + rows * new].reshape(rows, new)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, do_sample=False)

    SideBySide(tiny.llama).assert_same(call, reason)


def test_a_batch_without_rows_is_left_with_a_reason(model):
    outcome(tr.accelerate(model).generate, IDS[:0])
    assert "at least one row" in model.acceleration.fallback


@pytest.mark.parametrize(
    "name", ["float", "no rows", "no tokens", "neither", "two rows", "a token without an embedding"]
)
def test_a_stream_refuses_what_is_no_prompt(model, name):
    further = {"two rows": IDS.repeat(2, 1), "a token without an embedding": torch.full((1, 3), 10**6)}
    ids = {**INPUTS, **further}[name]
    with pytest.raises(ValueError, match="1000000" if name in further and len(ids) == 1 else re.escape(f"{ids.dtype}")):
        tr.stream(model, ids)
