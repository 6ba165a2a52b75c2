"""Models that a user changed by hand, before they are accelerated or between two calls: the outcome of a call is that
of plain `generate`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny
from support.architectures import model_of, named
from support.drafters import example
from support.side_by_side import SideBySide
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import token_recycling as tr

IDS = tiny.prompt(0, 5).repeat(1, 3)
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
Change = Callable[[LlamaForCausalLM], Any]


def first_layer_removed(model):
    del model.model.layers[0]


def layer_copied(model):
    model.model.layers[0] = copy.deepcopy(model.model.layers[1])


def layer_used_twice(model):
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers = 3


def last_layer_used_twice(model):
    model.model.layers[0] = model.model.layers[1]


def numbered_alike(model):
    model.model.layers[1].self_attn.layer_idx = 0


def first_layer_skipped(model):
    model.model.layers[0].forward = lambda states, *inputs, **named: states


def first_attention_without_cache(model):
    class Nothing(torch.nn.Module):
        def forward(self, hidden_states, **named):
            return torch.zeros_like(hidden_states), None

    model.model.layers[0].self_attn = Nothing()


def first_layer_replaced(model):
    class Same(torch.nn.Module):
        def forward(self, states, *inputs, **named):
            return states

    model.model.layers[0] = Same()


def vectors_shortened(model):
    """Wherever they are looked up."""
    model.model.embed_tokens.max_norm = 0.7
    model.lm_head.weight = model.model.embed_tokens.weight


def not_causal(model):
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def one_layer_not_causal(model):
    model.model.layers[1].self_attn.is_causal = False


def another_attention(model):
    attention = model.model.layers[0].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "eager"


def more_logits_than_embeddings(model):
    torch.manual_seed(3)
    model.lm_head = torch.nn.Linear(32, 90, bias=False)
    with torch.no_grad():
        model.lm_head.weight[64:] *= 0.01


def function_among_modules(model):
    model.model.layers[0].mlp._modules["act_fn"] = torch.relu


def derived(**methods: Callable[[type], Any]) -> Change:
    """Give the model a class that is derived from the one that it has, with methods made from that one."""

    def change(model):
        own = type(model)
        made = {name: make(own) for name, make in methods.items()}
        model.__class__ = type(own.__name__, (own,), {"__module__": __name__, **made})

    return change


def last_row(own):
    def forward(self, *inputs, **named):
        output = own.forward(self, *inputs, **named)
        output.logits = torch.cat([output.logits[:, :-1], output.logits[:, -1:].roll(3, -1)], 1)
        return output

    return forward


CHANGES: dict[str, Change] = {
    "huggingface/transformers#30508 the first layer removed": first_layer_removed,
    "huggingface/transformers#30508 a layer copied": layer_copied,
    "the first layer skipped": first_layer_skipped,
    "the first layer replaced by one without a cache": first_layer_replaced,
    "attention of the first layer replaced by one without a cache": first_attention_without_cache,
    "a layer used twice": layer_used_twice,
    "the last layer used twice": last_layer_used_twice,
    "layers of one number": numbered_alike,
    "an embedding that changes its weights": vectors_shortened,
    "attention to later tokens": not_causal,
    "one layer with attention to later tokens": one_layer_not_causal,
    "a layer with a configuration of its own": another_attention,
    "more logits than embeddings": more_logits_than_embeddings,
    "a function among modules": function_among_modules,
    "a derived class whose forward changes the last row": derived(forward=last_row),
}
FAILING = {function_among_modules: pytest.mark.failing_objects}
CASES = [pytest.param(change, id=name, marks=FAILING.get(change, ())) for name, change in CHANGES.items()]


def outcome(model: LlamaForCausalLM) -> Any:
    """Tokens of two equal calls, or the error."""
    try:
        return [model.generate(IDS, **GREEDY).tolist() for _ in range(2)]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("change", CASES)
def test_a_change_between_calls(change):
    both = SideBySide(tiny.llama)
    both.assert_same(outcome)
    both.change(change)
    both.assert_same(outcome, "")
    assert both.accelerated.acceleration.fallback is not None


@pytest.mark.failing_objects
def test_an_examination_that_fails_is_told_with_its_traceback(caplog):
    """It could be a fault of ours."""
    model = tr.accelerate(tiny.llama())
    function_among_modules(model)
    outcome(model)
    (record,) = [record for record in caplog.records if "cannot be examined" in record.getMessage()]
    assert record.exc_info
    assert record.exc_info[0] is AttributeError


@pytest.mark.parametrize("change", CASES)
def test_a_change_before_accelerate(change):
    plain, accelerated = tiny.llama(), tiny.llama()
    for model in (plain, accelerated):
        change(model)
    with contextlib.suppress(tr.UnsupportedModelError):
        tr.accelerate(accelerated)
    assert outcome(accelerated) == outcome(plain)
    refused = "acceleration" not in vars(accelerated)
    assert refused or accelerated.acceleration.fallback is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers.__delitem__(1),
        derived(forward=lambda own: own.forward),
        lambda model: setattr(model.config, "use_bidirectional_attention", True),
    ],
    ids=["the last layer removed", "a derived class that changes nothing", "a setting that llama does not read"],
)
def test_a_change_that_does_no_harm(change):
    both = SideBySide(tiny.llama)
    both.change(change)
    both.assert_same(outcome)


@pytest.mark.parametrize("place", [0, -1])
def test_a_processor_that_writes_to_the_prompt(place):
    """As by `generate`, the caller's own tensor is what processors see before the first token."""

    def write(ids, scores):
        ids[:, place] = (ids[:, place] + 1) % 60
        return scores.roll(int(ids[0, place]) % 3, 1)

    def call(model):
        ids = IDS.clone()
        return model.generate(ids, logits_processor=[write], **GREEDY), ids

    _, written = SideBySide(tiny.llama).assert_same(call)
    assert not torch.equal(written, IDS)


def test_a_library_that_counts_calls_in_a_class(monkeypatch):
    """As tracing tools do, which wrap `generate`: it is called once, whatever decodes."""
    calls, generate = [], LlamaForCausalLM.generate

    def traced(model, *args, **arguments):
        calls.append(arguments)
        return generate(model, *args, **arguments)

    both = SideBySide(tiny.llama)
    monkeypatch.setattr(LlamaForCausalLM, "generate", traced)
    both.assert_same(outcome)
    assert len(calls) == 4


@pytest.mark.usefixtures("nothing_compiled")
def test_a_part_that_is_compiled_holds_functions_of_torch():
    both = SideBySide(tiny.llama)
    both.accelerated.model.norm = torch.compile(both.accelerated.model.norm, backend="eager")
    both.assert_same(outcome)


def one_layer_left(model):
    del model.model.layers[1]
    model.config.num_hidden_layers = 1


def vocabulary_shortened(model):
    model.resize_token_embeddings(60)


NOT_FITTING = {
    "dflash": (one_layer_left, "hidden states 0 to 1"),
    "layer_skip": (one_layer_left, "num_hidden_layers must be >= 2"),
    "rest": (vocabulary_shortened, "ids must be below 60"),
    "assistant": (vocabulary_shortened, "logits for all 64 tokens"),
    "mtp": (vocabulary_shortened, None),
    "published": (vocabulary_shortened, None),
    "recycling": (vocabulary_shortened, None),
    "fuse": (vocabulary_shortened, None),
}
"""What changes under a drafter, and why it cannot draft then; None where it can."""


@pytest.mark.parametrize("name", NOT_FITTING)
def test_a_change_that_a_drafter_was_not_made_for(name, tmp_path):
    change, reason = NOT_FITTING[name]
    both = SideBySide(lambda: tiny.llama(seed=2))
    tr.accelerate(both.accelerated, example(name, both.accelerated, tmp_path))
    both.change(outcome)
    both.change(change)
    both.assert_same(outcome, reason)


def rolled(own):
    def forward(self, *inputs, **named):
        output = own(self, *inputs, **named)
        output.logits = output.logits.roll(output.logits.shape[1] == 1, -1)
        return output

    return forward


def shifted(own):
    def prepare(self, input_ids, **named):
        return own(self, (input_ids + (input_ids.shape[1] > 20)) % 64, **named)

    return prepare


def carried(own):
    def update(self, outputs, *inputs, **named):
        outputs.logits = outputs.logits.roll(1, -1)
        return own(self, outputs, *inputs, **named)

    return update


METHODS = {
    "forward": rolled,
    "prepare_inputs_for_generation": shifted,
    "_update_model_kwargs_for_generation": carried,
}


@pytest.mark.parametrize("derives", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_that_is_set_on_the_class_of_a_model(name, derives, monkeypatch):
    """By `type(model)`, which of an accelerated one is ours."""
    outcomes = []
    for prepare in (lambda model: model, tr.accelerate):
        model = prepare(tiny.llama())
        if derives:
            derived()(model)
        before = outcome(model)
        with monkeypatch.context() as patch:
            patch.setattr(type(model), name, METHODS[name](getattr(type(model), name)))
            outcomes.append([before, outcome(model), outcome(tr.decelerate(copy.deepcopy(model)))])
            refused = prepare is tr.accelerate and model.acceleration.fallback is not None
        assert outcome(model) == before
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] != outcomes[0][1] == outcomes[0][2]
    assert refused
    assert model.acceleration.fallback is None


def test_functions_of_torch_in_place_of_each_other():
    both = SideBySide(tiny.llama)
    for function, reason in ((torch.tanh, None), (torch.fliplr, ""), (torch.sigmoid, None)):
        for model in (both.plain, both.accelerated):
            for layer in model.model.layers:
                layer.mlp.__dict__["act_fn"] = function
                layer.mlp._modules.pop("act_fn", None)
        both.assert_same(outcome, reason)


def test_a_table_of_attention_functions_in_a_familys_module(monkeypatch):
    both = SideBySide(tiny.llama)
    before, attend = both.assert_same(outcome), AttentionInterface()["sdpa"]

    def attention(module, query, *inputs, **named):
        attended, weights = attend(module, query, *inputs, **named)
        return attended * (1.5 if query.shape[2] == 1 else 1), weights

    table = AttentionInterface()
    table["sdpa"] = attention
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", table)
    assert both.assert_same(outcome, "ALL_ATTENTION_FUNCTIONS") != before


@pytest.mark.usefixtures("nothing_compiled")
def test_a_setting_of_a_compiled_model():
    """Its forward passes are of a copy without graphs."""
    both, outcomes = SideBySide(lambda: model_of(named("cohere"))), []
    both.accelerated.compile(backend="eager")
    for scale in (1.0, -1.0):
        both.change(lambda model: setattr(model, "logit_scale", scale))  # noqa: B023
        outcomes.append(both.assert_same(outcome))
    assert outcomes[0] != outcomes[1]


def forwarding(base):
    class Derived(base):
        def forward(self, *inputs, **named):
            return super().forward(*inputs, **named)

    return Derived


def preparing(base):
    class Derived(base):
        def prepare_inputs_for_generation(self, input_ids, *, scale=1, **named):
            return super().prepare_inputs_for_generation(input_ids * scale, **named)

    return Derived


def decorated(base):
    def named(function):
        def calling(*inputs, **others):
            return calling and function(*inputs, **others)

        return calling

    class Derived(base):
        @classmethod
        @named
        def can_generate(cls):
            return super().can_generate()

        @property
        def device(self):
            return super().device

        @torch.no_grad()
        def forward(self, *inputs, **named):
            return super().forward(*inputs, **named)

    return Derived


@pytest.mark.parametrize("derive", [forwarding, preparing, decorated])
def test_a_class_that_is_derived_from_that_of_an_accelerated_model(derive):
    """Copies and models that are decelerated are of the same class without ours; `super()` means that one."""
    both = SideBySide(tiny.llama)
    both.change(lambda model: setattr(model, "__class__", derive(type(model))))
    wanted = both.assert_same(outcome)
    assert outcome(copy.deepcopy(both.accelerated)) == wanted
    assert outcome(tr.decelerate(both.accelerated)) == wanted
    tr.accelerate(both.accelerated)
    both.assert_same(outcome)
