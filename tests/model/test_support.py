"""Unsupported calls fall back to transformers with a warning; unsupported models are refused by name and reason."""

import copy
import logging
from typing import Any

import pytest
import torch
import transformers
from support import tiny
from support.architectures import model_of, named
from support.side_by_side import SideBySide
from transformers import DynamicCache, LlamaForCausalLM

import token_recycling as tr
from token_recycling.model import self_test

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
BATCH = torch.cat([tiny.prompt(0, 6), tiny.prompt(1, 6)])


CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "a batch with a processor": ({"inputs": BATCH, "logits_processor": [lambda ids, scores: scores]}, "lambda"),
    "padding within": ({"attention_mask": torch.tensor([[1, 0, 0, 1, 1, 1]])}, "padding must be on the left"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "hidden states": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states"),
    "no cache": ({"use_cache": False}, "use_cache=True"),
    "a quantized cache": (
        {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}},
        "QuantizedCache",
    ),
    "embeddings": ({"inputs": None, "inputs_embeds": torch.zeros(1, 4, 32)}, "embeddings"),
    "other positions": ({"position_ids": torch.arange(6)[None] + 3}, "count from 0"),
}


@pytest.mark.parametrize(("arguments", "reason"), CALLS.values(), ids=CALLS.keys())
@pytest.mark.falls_back
def test_unsupported_calls_fall_back_to_transformers_with_a_warning(model, caplog, arguments, reason):
    if arguments.get("output_attentions"):
        model.set_attn_implementation("eager")
    arguments = {"inputs": tiny.prompt(0, 6), **GREEDY, "pad_token_id": 0, **arguments}
    plain, _ = tiny.seeded(model.generate, **arguments)
    tr.accelerate(model)
    caplog.clear()  # numba may have compiled
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        ours, _ = tiny.seeded(model.generate, **arguments)
        tiny.seeded(model.generate, **arguments)
    if not isinstance(plain, torch.Tensor):
        ours, plain = ours.sequences, plain.sequences
    assert torch.equal(ours, plain)
    assert [reason in record.getMessage() for record in caplog.records if record.name == "token_recycling"] == [True]
    assert reason in str(model.acceleration.fallback)
    assert model.acceleration.total.steps == 0


def make_bidirectional(model):
    """Change the configuration, which determines the masks, after the layers were created."""
    model.config.use_bidirectional_attention = True
    return model


SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
BERT = {**SMALL, "num_attention_heads": 4, "intermediate_size": 64}
REFUSED = {
    "RwkvForCausalLM": lambda: transformers.RwkvForCausalLM(transformers.RwkvConfig(**SMALL)),
    "T5ForConditionalGeneration": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "BertModel": lambda: transformers.BertModel(transformers.BertConfig(**BERT)),
    "LlamaForCausalLM is not causal": lambda: tiny.llama(is_causal=False),
    "of one token: 1": lambda: tiny.windowed(1),
    "Gemma3ForCausalLM is not causal": lambda: make_bidirectional(model_of(named("gemma3_text"))),
}


@pytest.mark.parametrize(("reason", "make"), REFUSED.items())
def test_unsupported_models_are_refused_by_name(make, reason):
    model = make().eval()
    original = type(model)
    assert reason in tr.why_not(model)
    for attempt in (
        lambda: tr.accelerate(model),
        lambda: tr.generate(model, tiny.prompt(0, 4), max_new_tokens=2),
        lambda: tr.stream(model, tiny.prompt(0, 4)),
    ):
        with pytest.raises(tr.UnsupportedModelError, match=reason):
            attempt()
    assert type(model) is original


def test_caches_that_cannot_roll_back_are_refused(model):
    static = transformers.StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(tr.UnsupportedModelError, match="StaticCache is unsupported"):
        tr.stream(model, tiny.prompt(0, 4), past_key_values=static)
    recording = DynamicCache(
        config=transformers.Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"])
    )
    recording.activate_past_recording()
    with pytest.raises(tr.UnsupportedModelError, match="records earlier states"):
        tr.stream(model, tiny.prompt(0, 4), past_key_values=recording)


@pytest.mark.falls_back
def test_accelerated_assistant_model_drafts_as_before(model):
    assistant = tiny.llama(seed=1)
    wanted = model.generate(tiny.prompt(0, 6), assistant_model=assistant, **GREEDY)
    tr.accelerate(assistant)
    assert torch.equal(model.generate(tiny.prompt(0, 6), assistant_model=assistant, **GREEDY), wanted)
    assert "drafts for another model" in str(assistant.acceleration.fallback)


class Wrapper(torch.nn.Module):
    """A wrapper around a model, like peft's: it forwards calls."""

    def __init__(self, model):
        super().__init__()
        self.base_model = torch.nn.ModuleDict({"model": model})

    def generate(self, *args, **kwargs):
        return self.base_model["model"].generate(*args, **kwargs)


def test_wrapper_is_refused_naming_the_model_to_pass(model):
    wrapper, wanted = Wrapper(model), model.generate(tiny.prompt(0, 6), **GREEDY)
    with pytest.raises(tr.UnsupportedModelError, match=r"LlamaForCausalLM in its \.base_model\.model"):
        tr.accelerate(wrapper)
    tr.accelerate(wrapper.base_model.model)
    assert torch.equal(wrapper.generate(tiny.prompt(0, 6), **GREEDY), wanted)
    assert model.acceleration.stats.steps


@pytest.mark.parametrize("nothing", [None, "meta-llama", LlamaForCausalLM, torch.nn.Tanh()])
def test_objects_that_are_not_models_are_refused(nothing):
    with pytest.raises(tr.UnsupportedModelError, match=type(nothing).__name__ if nothing else "None"):
        tr.accelerate(nothing)


def test_passed_self_tests_are_saved_and_failed_ones_are_not(monkeypatch):
    """Since other weights may pass."""
    tried, verdict = [], self_test.verdict
    monkeypatch.setattr(self_test, "verdict", lambda target: (tried.append(target.model), verdict(target))[1])
    assert tr.why_not(tiny.llama()) is None
    assert not tried, "a tested family needs no self-test"
    failing = [tiny.unknown(tiny.llama()) for _ in range(2)]
    for model in failing:
        model.lm_head.weight.data.zero_()
        assert "logits" in str(tr.why_not(model))
    first, same = tiny.unknown(tiny.llama()), tiny.unknown(tiny.llama(seed=1))
    other = tiny.unknown(tiny.llama(num_hidden_layers=1))
    assert [tr.why_not(model) for model in (first, same, other)] == [None] * 3
    assert tried == [*failing, first, other]
    assert tr.check(same, self_test=True).supported
    assert tried == [*failing, first, other, same], "a requested self-test always runs"
    attending, upgraded = tiny.unknown(tiny.llama()), tiny.unknown(tiny.llama())
    attending.set_attn_implementation("eager")
    assert tr.why_not(attending) is None
    with monkeypatch.context() as patch:
        patch.setattr(self_test, "installed", lambda name: "99.0")
        assert tr.why_not(upgraded) is None
    assert [tried.pop() for _ in range(2)] == [upgraded, attending], "as another attention or release may fail"
    for _ in range(2):
        written = tiny.unknown(tiny.llama())
        written.__class__ = type("Written", (LlamaForCausalLM,), {"__module__": "nowhere"})
        assert tr.why_not(written) is None
        assert tried.pop() is written, "a class without a file, as in a notebook, may have changed"


def in_an_attribute(model):
    model.passes += 1


def in_a_buffer(model):
    model.passed.add_(1)


def in_the_random_state(model):
    torch.rand(1)


@pytest.mark.parametrize("keep", [in_an_attribute, in_a_buffer, in_the_random_state])
@pytest.mark.falls_back
def test_own_code_of_an_unknown_model_keeps_the_state_of_generate(keep):
    """The self-test changes nothing either."""

    class Own(LlamaForCausalLM):
        passes = 0

        def forward(self, *args, **kwargs):
            keep(self)
            return super().forward(*args, **kwargs)

    states = []
    for accelerate in (lambda model: model, tr.accelerate):
        model = tiny.unknown(tiny.llama())
        model.__class__ = Own
        model.register_buffer("passed", torch.zeros(1))
        torch.manual_seed(0)
        accelerate(model).generate(tiny.prompt(0, 6), **GREEDY)
        states.append((model.passes, model.passed.item(), torch.get_rng_state().tolist()))
    assert states[0] == states[1]
    assert model.acceleration.fallback is not None


@pytest.mark.parametrize("patience", [float("inf"), -1.0])
def test_slow_self_test_is_announced(patience, monkeypatch, caplog):
    monkeypatch.setattr(self_test, "_PATIENCE", patience)
    with caplog.at_level(logging.WARNING, logger="token_recycling"):
        assert tr.check(tiny.llama(), self_test=True).supported
    assert ("once on this machine" in caplog.text) == (patience < 0)


def test_family_with_offset_positions_passes_the_self_test():
    """RoBERTa computes offset positions by itself, but `generate` passes positions from 0."""
    config = {**BERT, "is_decoder": True, "max_position_embeddings": 128}
    model = transformers.RobertaForCausalLM(transformers.RobertaConfig(**config)).eval()
    assert tr.check(model, self_test=True).supported


@pytest.mark.parametrize(("family", "changed"), [("llama", "module"), ("qwen3", "configuration")])
def test_rotary_scaling_that_differs_from_the_configuration_is_refused(family, changed):
    """The frequencies change with the length, which the model's configuration does not state."""
    model = model_of(named(family))
    dynamic = copy.deepcopy(model.config)
    dynamic.rope_parameters = {**(dynamic.rope_parameters or {}), "rope_type": "dynamic", "factor": 4.0}
    dynamic.max_position_embeddings = 8
    ids = tiny.prompt(0, 6)
    if changed == "module":
        holder, name = next(
            (part, name) for part in model.modules() for name in vars(part)["_modules"] if "rotary" in name
        )
        setattr(holder, name, type(getattr(holder, name))(dynamic))
    else:
        fresh = type(model)(dynamic)
        fresh.load_state_dict(model.state_dict())
        model, model.config = fresh, model.config
    wanted = copy.deepcopy(model).generate(ids, max_new_tokens=30, do_sample=False)
    with pytest.raises(tr.UnsupportedModelError, match="whose rotary scaling is not"):
        tr.accelerate(model)
    assert torch.equal(model.generate(ids, max_new_tokens=30, do_sample=False), wanted)


@pytest.mark.falls_back
def test_rotary_module_replaced_between_calls_is_detected():
    def call(model):
        return model.generate(tiny.prompt(0, 6).repeat(1, 3), max_new_tokens=30, do_sample=False)

    def exchange(model):
        scaled = copy.deepcopy(model.config)
        scaled.rope_parameters = {**scaled.rope_parameters, "rope_type": "dynamic", "factor": 4.0}
        scaled.max_position_embeddings = 20
        model.model.rotary_emb = type(model.model.rotary_emb)(scaled)

    both = SideBySide(lambda: model_of(named("llama")))
    both.assert_same(call)
    both.change(exchange)
    both.assert_same(call, "whose rotary scaling is not")


@pytest.mark.falls_back
def test_rotary_length_changed_between_calls_is_detected():
    """Beyond that length the frequencies change with every token."""

    def call(model, new=24):
        return model.generate(tiny.prompt(0, 6), max_new_tokens=new, do_sample=False)

    both = SideBySide(lambda: model_of(named("llama", "dynamic")))
    both.assert_same(lambda model: call(model, 20))
    for rotary in both.change(lambda model: model.model.rotary_emb):
        rotary.original_max_seq_len = rotary.max_seq_len_cached = 12
    both.assert_same(call, "whose rotary scaling is not")
