"""Inputs that plain `generate` takes or refuses: ours returns the same dtype, or raises the same error."""

from __future__ import annotations

import re

import pytest
import torch
from support import tiny
from support.batches import batch

import token_recycling as tr

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


@pytest.mark.parametrize("arguments", WAYS)
@pytest.mark.parametrize("name", INPUTS)
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


@pytest.mark.parametrize("rows", [[0], [3, 0], [0, 3], [0, 0]], ids=str)
def test_a_row_that_is_all_padding_is_left_to_generate(ending, rows):
    inputs = batch(rows, 1, spare=2)
    ids, others = inputs.pop("input_ids"), inputs
    expected = outcome(ending.generate, ids, do_sample=False, **others)
    assert outcome(tr.accelerate(ending).generate, ids, do_sample=False, **others) == expected
    assert "padding must be on the left" in ending.acceleration.fallback


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
