"""Calls of models with recurrent layers: output and final cache equal those of `generate`."""

import copy
import pickle

import pytest
import torch
from support import tiny
from support.architectures import model_of
from support.batches import padded
from support.cases import thinned
from support.drafters import Garbage, example
from support.recurrent_architectures import recurrent
from support.slots import assert_same_slots
from transformers import DynamicCache

import token_recycling as tr
from token_recycling.drafters.draft_model import DraftModel

FAMILIES = ["qwen3_5_text", "lfm2", "falcon_h1", "mamba2", "nemotron_h", "jamba"]
"""The first and the fourth in every run, the others nightly."""
DRAFTER = "recycling:tree=8"
ENDS = [7, 11, 23, 41]


def hybrid(family="qwen3_5_text"):
    return model_of(recurrent(family))


@pytest.fixture(scope="module", params=thinned(FAMILIES))
def model(request):
    return hybrid(request.param)


def prompts(lengths, seed=0):
    """Random prompts, padded on the left."""
    return padded([tiny.prompt(seed + row, length, 96)[0] for row, length in enumerate(lengths)])


def assert_same_call(model, drafter=DRAFTER, **arguments):
    """Assert that an accelerated call returns the same sequences and cache as a plain one."""
    arguments = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, **arguments}
    wanted, stats = model.generate(**copy.deepcopy(arguments)), tr.Stats()
    ours = tr.generate(model, drafter=tr.make_drafter(drafter), stats=stats, **copy.deepcopy(arguments))
    assert stats.steps, "the call was accelerated"
    assert torch.equal(ours.sequences, wanted.sequences)
    if "past_key_values" in wanted:  # mamba's output has none
        padding = (arguments["attention_mask"] == 0).sum(dim=1).tolist()
        assert_same_states(ours.past_key_values, wanted.past_key_values, padding)


def assert_same_states(ours, theirs, padding):
    """Assert equal states, keys and values, except those of padding."""
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        for states in ("conv_states", "recurrent_states"):
            pair = (getattr(layer, states, {}).values() for layer in (one, other))
            for state, wanted in zip(*pair, strict=True):
                torch.testing.assert_close(state, wanted, atol=3e-4, rtol=1e-3)
    if any(hasattr(layer, "keys") for layer in theirs.layers):
        assert_same_slots(ours, theirs, padding, atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("lengths", thinned([[12, 5, 9], [9], [1, 1], [1, 3]], every=2, ids=str))
def test_outputs_and_caches_equal_those_of_generate(model, lengths):
    assert_same_call(model, **prompts(lengths), eos_token_id=ENDS, pad_token_id=0)
    assert_same_call(model, Garbage(), **prompts(lengths, seed=5))


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_pickled_or_copied_cache_is_continued(family):
    plain, arguments = hybrid(family), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    accelerated, ids = tr.accelerate(copy.deepcopy(plain), DRAFTER), tiny.prompt(0, 9, 96)
    cache = DynamicCache(config=plain.config)
    ids = torch.cat([accelerated.generate(ids, past_key_values=cache, **arguments), tiny.prompt(1, 3, 96)], dim=1)
    wanted = plain.generate(ids, **arguments)
    for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
        for model in (copy.deepcopy(accelerated), plain):
            given = copy.deepcopy(other)
            assert torch.equal(model.generate(ids, past_key_values=given, **arguments), wanted)
            assert given.get_seq_length() == wanted.shape[1] - 1


def test_row_that_ends_with_its_first_token_does_not_affect_others(model):
    """No state has been committed by then."""
    inputs = prompts([5, 12, 9])
    first = model.generate(**inputs, max_new_tokens=1, do_sample=False, pad_token_id=0)[:, -1].tolist()
    for end in first:
        arguments = {**inputs, "max_new_tokens": 14, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
        assert torch.equal(tr.generate(model, drafter=DRAFTER, **arguments), model.generate(**arguments))


def test_states_that_cannot_be_continued_are_rejected():
    """Of a family that cannot extend cached states, and of an unknown number of tokens."""
    model = hybrid("jamba")
    cache = DynamicCache(config=model.config)
    list(tr.stream(model, tiny.prompt(0, 6, 96), DRAFTER, max_new_tokens=4, past_key_values=cache))
    with pytest.raises(tr.UnsupportedModelError, match="14 tokens, got one of 9"):
        tr.stream(model, tiny.prompt(0, 14, 96), DRAFTER, past_key_values=cache)
    model = hybrid("mamba2")
    cache = model(input_ids=tiny.prompt(0, 6, 96)).cache_params
    with pytest.raises(tr.UnsupportedModelError, match="unknown number of tokens"):
        tr.stream(model, tiny.prompt(0, 8, 96), past_key_values=cache)


@pytest.mark.nightly
def test_every_drafter_drafts_for_a_hybrid(tmp_path):
    model, inputs = hybrid(), prompts([12])
    for name in tr.drafter_names():
        if name in ("layer_skip", "draft_model", "assistant", "specdec_pp", "mtp"):
            continue  # these need a draft model (see the next test) or layers that this family does not have
        folder = tmp_path / name
        folder.mkdir()
        assert_same_call(model, example(name, model, folder), **inputs)


def test_attention_only_model_drafts_for_a_hybrid_but_not_vice_versa():
    target, drafts = hybrid(), tiny.llama(vocab_size=96)
    assert_same_call(target, DraftModel(drafts), **prompts([12]))
    with pytest.raises(tr.UnsupportedModelError, match="cannot be the draft model"):
        tr.generate(drafts, tiny.prompt(0, 5, 96), drafter=DraftModel(target), max_new_tokens=4)
    with pytest.raises(tr.UnsupportedModelError, match="layers cannot be skipped"):
        tr.generate(target, tiny.prompt(0, 5, 96), drafter="layer_skip", max_new_tokens=4)


@pytest.mark.nightly
@pytest.mark.falls_back
def test_compiled_hybrid_falls_back():
    model = tr.accelerate(hybrid("lfm2"), DRAFTER)
    model.generate(**prompts([5]), max_new_tokens=2)
    assert model.acceleration.fallback is None
    model.model.layers[0].forward = torch.compile(model.model.layers[0].forward, backend="eager")
    model.generate(**prompts([5]), max_new_tokens=2)
    assert "is compiled" in str(model.acceleration.fallback)
