"""Inputs that plain `generate` accepts or rejects: accelerated calls return the same tokens in the same dtype, or raise
the same error.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from support import tiny
from support.batches import batch
from support.cases import paired
from support.side_by_side import SideBySide
from transformers import DynamicCache, LlamaForCausalLM

import token_recycling as tr
from token_recycling._util.text_stream import StepRecorder

pytestmark = pytest.mark.falls_back

IDS = tiny.prompt(0, 6)
WAYS = [{}, {"do_sample": True}, {"eos_token_id": 3}, {"return_dict_in_generate": True}]


def outcome(generate, input_ids, **arguments):
    torch.manual_seed(0)
    try:
        output = generate(input_ids, **{"max_new_tokens": 4, "pad_token_id": 0, **arguments})
    except Exception as error:
        return type(error), str(error)
    output = output if isinstance(output, torch.Tensor) else output.sequences
    return output.dtype, output.tolist()


def assert_same_outcome(model, input_ids, **arguments):
    """Assert that a call has the same outcome before and after `accelerate`, and return it."""
    expected = outcome(model.generate, input_ids, **arguments)
    assert outcome(tr.accelerate(model).generate, input_ids, **arguments) == expected
    return expected


INPUTS = {
    "int64": IDS,
    "int32": IDS.int(),
    "int16": IDS.short(),
    "float": IDS.float(),
    "no rows": IDS[:0],
    "no tokens": IDS[:, :0],
    "no rows, no tokens": IDS[:0, :0],
    "one dimension": IDS[0],
}


@pytest.mark.parametrize(("name", "arguments"), paired(INPUTS, WAYS))
def test_inputs_return_or_raise_the_same_as_in_generate(model, name, arguments):
    assert_same_outcome(model, INPUTS[name], **arguments)


def test_synced_gpus_are_left_to_generate(model):
    """It fails without a process group."""
    error, message = assert_same_outcome(model, IDS, synced_gpus=True)
    assert issubclass(error, Exception)
    assert "process group" in message
    assert "synced_gpus" in model.acceleration.fallback


def test_int32_ids_of_a_padded_batch(ending):
    inputs = batch([4, 9, 5], 1)
    inputs["input_ids"] = inputs["input_ids"].int()
    assert assert_same_outcome(ending, **inputs, do_sample=False)[0] == torch.int64


@pytest.mark.parametrize("token", [-1, 10**6])
@pytest.mark.parametrize(("lengths", "spare"), [([4], 3), ([4, 9], 0), ([8, 8, 8], 0)])
def test_padding_token_without_an_embedding(ending, lengths, spare, token):
    """`generate` reads padding, before prompts and after ended rows (huggingface/transformers#23401)."""
    inputs = batch(lengths, 1, spare)
    inputs["input_ids"][inputs["attention_mask"] == 0] = token
    error, _ = assert_same_outcome(ending, **inputs, pad_token_id=token, max_new_tokens=30, do_sample=False)
    assert error is IndexError


@pytest.mark.parametrize("lengths", [[6], [300], [4, 9, 300]], ids=str)
def test_position_ids_that_do_not_count_tokens_fall_back(lengths):
    model = tiny.llama(max_position_embeddings=512)
    inputs = {**batch(lengths, 1), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    usual = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    of_the_last_row = usual + (torch.arange(len(usual)) == len(usual) - 1)[:, None]
    for positions, counted in ((usual, True), (usual + 1, False), (2 * usual, False), (of_the_last_row, False)):
        expected = model.generate(**inputs, position_ids=positions)
        with tr.accelerated(model) as acceleration:
            assert torch.equal(model.generate(**inputs, position_ids=positions), expected)
        assert (acceleration.fallback is None) == counted
        assert counted or "position_ids" in acceleration.fallback


@pytest.mark.parametrize("spare", [0, 1, 7])
def test_recorder_receives_only_new_tokens_after_a_padded_prompt(ending, spare):
    recorder, inputs = StepRecorder(), {**batch([6], 0, spare=spare), "max_new_tokens": 12}
    wanted = ending.generate(**inputs)
    assert torch.equal(tr.generate(ending, **inputs, streamer=recorder), wanted)
    assert recorder.tokens == wanted[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("positions", [torch.arange(6)[(None,) * axes] for axes in (0, 2, 3)])
def test_position_ids_of_other_shapes(model, positions):
    assert_same_outcome(model, IDS, position_ids=positions, do_sample=False)


@pytest.mark.parametrize("kept", [torch.tensor([0]), torch.tensor([5]), torch.tensor([0, 2, 3]), -1, 0, 2])
def test_logits_to_keep(model, kept):
    """The first token may be chosen from logits at another position than the prompt's last."""
    assert_same_outcome(model, IDS, logits_to_keep=kept, do_sample=False)


class Negated(LlamaForCausalLM):
    """Negates the logits unless `sign` is given."""

    def forward(self, *args, sign=1, **kwargs):
        output = super().forward(*args, **kwargs)
        return dataclasses.replace(output, logits=-output.logits if sign is None else output.logits)


@pytest.mark.parametrize("name", ["sign", "logits_to_keep", "position_ids", "token_type_ids"])
def test_inputs_of_none(name):
    """Where the model has another default, it is not left out."""
    model = tiny.llama()
    model.__class__ = Negated
    assert_same_outcome(model, IDS, **{name: None}, do_sample=False)
    assert (model.acceleration.fallback is None) == (name in ("position_ids", "token_type_ids"))


@pytest.mark.parametrize("rows", [[0], [3, 0], [0, 3], [0, 0]], ids=str)
def test_row_without_tokens_falls_back(ending, rows):
    assert_same_outcome(ending, **batch(rows, 1, spare=2), do_sample=False)
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
def test_attention_mask_of_another_shape_than_the_ids(name, rows):
    model, ids, mask = tiny.gpt2().eval(), tiny.prompt(3, 12).reshape(2, 6)[:rows], MASKS[name]
    assert_same_outcome(model, ids, attention_mask=mask, do_sample=False)


@pytest.mark.parametrize(
    ("cached", "new", "rows", "reason"),
    [(9, 3, 1, "all tokens"), (5, 12, 1, "count from 0"), (5, 12, 2, "count from 0")],
)
def test_new_tokens_without_the_cached_ones_fall_back(cached, new, rows, reason):
    """`generate` accepts them, fewer or more than the cache holds, if the mask shows that the cached ones are not
    given.
    """
    mask, text = torch.ones(rows, cached + new).long(), tiny.prompt(3, 2 * (cached + new))

    def call(model):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text[:, :cached].repeat(rows, 1), past_key_values=cache)
        ids = text[0, cached : cached + rows * new].reshape(rows, new)
        return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=9, do_sample=False)

    SideBySide(tiny.llama).assert_same(call, reason)


def test_batch_without_rows_falls_back_with_a_reason(model):
    outcome(tr.accelerate(model).generate, IDS[:0])
    assert "at least one row" in model.acceleration.fallback


@pytest.mark.parametrize(
    "name", ["float", "no rows", "no tokens", "no rows, no tokens", "two rows", "a token without an embedding"]
)
def test_stream_rejects_invalid_prompts(model, name):
    further = {"two rows": IDS.repeat(2, 1), "a token without an embedding": torch.full((1, 3), 10**6)}
    ids = {**INPUTS, **further}[name]
    with pytest.raises(ValueError, match="1000000" if name in further and len(ids) == 1 else re.escape(f"{ids.dtype}")):
        tr.stream(model, ids)
