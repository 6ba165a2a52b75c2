"""Models on several devices: weights offloaded by accelerate, and a simulated second device (see elsewhere.py)."""

from __future__ import annotations

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from support import tiny
from support.architectures import chosen, model_of, named
from support.batches import batch, next_turn
from support.cases import thinned
from support.drafters import Garbage
from support.elsewhere import THERE, Elsewhere, another_device, put_there
from support.on_device import moved
from transformers import LlamaForCausalLM, RepetitionPenaltyLogitsProcessor

import token_recycling as tr
from token_recycling.drafters._shared.neural import placed_copy

GREEDY: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
HERE = torch.device("cpu")

MAPS = {
    "a layer on disk": {**dict.fromkeys(tiny.PARTS, "cpu"), "model.layers.1": "disk"},
    "all on disk": {"": "disk"},
}


@pytest.mark.parametrize(("placed", "tied"), thinned(itertools.product(MAPS, [False, True])))
def test_weights_placed_by_a_device_map(tmp_path, placed, tied):
    """Between forward passes offloaded weights, including the embedding's, are on the meta device."""
    model, ids, inputs = tiny.llama(tie_word_embeddings=tied), tiny.prompt(0, 8), batch([5, 9, 3], 1)
    model.generation_config.pad_token_id = 0
    wanted, wanted_batch = model.generate(ids, **GREEDY), model.generate(**inputs, **GREEDY)
    model.save_pretrained(tmp_path / "model")
    model = LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map=MAPS[placed], offload_folder=str(tmp_path / "off"), dtype=torch.float32
    )
    tr.accelerate(model, tree="paper")
    assert torch.equal(model.generate(ids, **GREEDY), wanted)
    assert torch.equal(model.generate(**inputs, **GREEDY), wanted_batch)
    assert model.acceleration.fallback is None
    assert tr.check(model, self_test=True).supported


def test_load_accepts_a_device_map(tiny_model_dir):
    ids = tiny.prompt(0, 8)
    wanted, _ = tr.load(tiny_model_dir, device="cpu")
    model, _ = tr.load(tiny_model_dir, device_map=MAPS["a layer on disk"])
    assert model.hf_device_map == MAPS["a layer on disk"]
    assert torch.equal(tr.generate(model, ids, **GREEDY), wanted.generate(ids, **GREEDY))
    for given, value in (({"device": "cpu", "device_map": "auto"}, "'auto'"), ({"device_map": "nowhere"}, "nowhere")):
        with pytest.raises(ValueError, match=value):
            tr.load(tiny_model_dir, **given)


def test_model_without_weights_is_refused(model):
    model.to("meta")
    with pytest.raises(tr.UnsupportedModelError, match="LlamaForCausalLM has no weights"):
        tr.stream(model, tiny.prompt(0, 4))


@pytest.fixture
def two_devices():
    with another_device():
        yield


def test_stand_in_rejects_operations_across_devices(two_devices):
    there = torch.arange(3, device=THERE)
    assert (there.device, there.to(HERE).device) == (THERE, HERE)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.arange(3)
    assert (there + 1).tolist() == [1, 2, 3]
    assert isinstance(there[1:].narrow(0, 0, 1).clone(), Elsewhere)


def move_inputs(module, device):
    """Make a module move its inputs to its device, as accelerate's hooks do: with stateless code."""

    def to_device(value):
        if isinstance(value, tuple):
            return tuple(map(to_device, value))
        return value.to(device) if isinstance(value, torch.Tensor) else value

    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(
        *map(to_device, args), **{name: to_device(value) for name, value in kwargs.items()}
    )


def put_first_half_there(model):
    """Move the first half of the model; the logits are computed on the host."""
    inner = model.model
    for module in (inner.embed_tokens, inner.rotary_emb, inner.layers[0]):
        put_there(module)
        move_inputs(module, THERE)
    for module in (inner.layers[1], inner.norm, model.lm_head):
        move_inputs(module, HERE)


@pytest.mark.parametrize(
    ("place", "prompts", "drafter"),
    thinned(
        [
            (put_there, HERE, "published"),
            (put_there, THERE, "recycling"),
            (put_first_half_there, HERE, "recycling:tree=paper"),
            (put_first_half_there, THERE, "published"),
        ],
        every=4,
    ),
)
def test_prompts_drafts_and_logits_on_different_devices(two_devices, place, prompts, drafter):
    model, ids, inputs = tiny.llama(), tiny.prompt(0, 8), batch([5, 9, 3], 1)
    model.generation_config.pad_token_id = 0
    ways = [
        {"input_ids": ids},
        {"input_ids": ids, "repetition_penalty": 1.3, "eos_token_id": [3, 9]},
        {"input_ids": ids, "do_sample": True, "top_k": 20},
        {"input_ids": ids, "do_sample": True, "top_k": 4, "eos_token_id": [*range(0, 64, 3)]},
        {"input_ids": ids, "logits_processor": [RepetitionPenaltyLogitsProcessor(4.0, prompt_ignore_length=7)]},
        inputs,
        {**inputs, "return_dict_in_generate": True, "output_scores": True, "eos_token_id": [3, 9]},
    ]
    wanted = [tiny.seeded(model.generate, **{**GREEDY, **way}) for way in ways]
    place(model)
    tr.accelerate(model, drafter)
    for way, (text, state) in zip(ways, wanted, strict=True):
        ours, after = tiny.seeded(model.generate, **{**GREEDY, **moved(way, prompts)})
        assert torch.equal(after, state)
        assert model.acceleration.fallback is None
        if not isinstance(text, torch.Tensor):
            ours, text = ours.sequences, text.sequences
        assert ours.device == prompts
        assert torch.equal(ours.to(HERE), text)


@pytest.mark.parametrize("seed", thinned(range(4), 4))
def test_repeated_pass_consumes_no_random_numbers(two_devices, seed):
    """NaN states of a drafted token spoil a forward pass, which is then repeated without a draft."""
    model, ids = tiny.llama(), tiny.prompt(0, 5)
    how: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "temperature": 0.7, "top_k": 12}
    wanted, state = tiny.seeded(model.generate, ids, seed=seed, **how)
    embeddings = model.get_input_embeddings().weight
    embeddings[[token for token in range(len(embeddings)) if token not in wanted]] = torch.nan
    put_there(model)
    stats = tr.Stats()
    ours, after = tiny.seeded(
        tr.generate, model, ids.to(THERE), seed=seed, drafter=Garbage(seed=seed), stats=stats, **how
    )
    assert torch.equal(ours.to(HERE), wanted)
    assert torch.equal(after, state)
    assert stats.steps > 3


class Stream:
    """A stream whose copies are synchronous."""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def wait_stream(self, other):
        pass


@pytest.fixture
def offloading(two_devices):
    """Make transformers' offloaded caches work on the simulated device."""
    with (
        mock.patch.object(torch, "Stream", Stream),
        mock.patch.object(torch.cuda, "default_stream", return_value=Stream()),
    ):
        yield


@pytest.mark.parametrize("case", chosen([named("llama"), named("mistral", "window of 8"), named("deepseek_v3")]))
def test_offloaded_cache_stays_on_the_host(offloading, case):
    """Plain and accelerated `generate` both continue it."""
    model, inputs = model_of(case, "eager"), batch([5, 9, 3], 1)
    model.generation_config.pad_token_id = 0
    wanted = model.generate(**inputs, **GREEDY)
    put_there(model)
    inputs = moved(inputs, THERE)
    arguments = {"cache_implementation": "offloaded", "return_dict_in_generate": True, **GREEDY}
    plain = model.generate(**inputs, **arguments)
    ours = tr.generate(model, **inputs, **arguments)
    assert ours.stats.steps
    assert torch.equal(ours.sequences.to(HERE), wanted)
    assert {layer.keys.device for layer in ours.past_key_values.layers} == {HERE}
    inputs = {**next_turn(inputs, ours.sequences, 7), **GREEDY}
    texts = [
        model.generate(**inputs, past_key_values=copy.deepcopy(plain.past_key_values)),
        model.generate(**inputs, past_key_values=copy.deepcopy(ours.past_key_values)),
        tr.generate(model, **inputs, past_key_values=plain.past_key_values),
        tr.generate(model, **inputs, past_key_values=ours.past_key_values),
    ]
    assert all(torch.equal(text.to(HERE), texts[0].to(HERE)) for text in texts)


def test_offloaded_static_cache_is_filled_at_the_end(offloading):
    model, ids = tiny.llama(), tiny.prompt(0, 8)
    put_there(model)
    arguments = {"cache_implementation": "offloaded_static", "return_dict_in_generate": True, **GREEDY}
    wanted = model.generate(ids.to(THERE), **arguments)
    ours = tr.generate(model, ids.to(THERE), **arguments)
    assert torch.equal(ours.sequences.to(HERE), wanted.sequences.to(HERE))
    for own, theirs in zip(ours.past_key_values.layers, wanted.past_key_values.layers, strict=True):
        assert own.keys.device == theirs.keys.device
        torch.testing.assert_close(own.keys.to(HERE), theirs.keys.to(HERE), atol=1e-5, rtol=1e-4)


def test_placed_copy_converts_parameters_but_not_buffers():
    """Rotary frequencies need full precision; the original model does not change."""
    model = tiny.llama().train()
    copied = placed_copy(model, torch.device("cpu"), torch.bfloat16)
    assert {weight.dtype for weight in copied.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in copied.buffers()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert not copied.training
    assert not any(weight.requires_grad for weight in copied.parameters())
    assert model.training
