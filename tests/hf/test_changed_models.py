"""Models that a user changed before `accelerate` or between two calls. The outcome of a call equals that of plain
`generate`.
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

pytestmark = pytest.mark.falls_back

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


def layers_with_the_same_number(model):
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


def embeddings_rescaled_at_lookup(model):
    """With `max_norm` every lookup rescales the weights."""
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
    """Give the model a subclass of its class, with methods made from that class."""

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
    "two layers of the same number": layers_with_the_same_number,
    "an embedding that changes its weights": embeddings_rescaled_at_lookup,
    "attention to later tokens": not_causal,
    "one layer with attention to later tokens": one_layer_not_causal,
    "a layer with its own configuration": another_attention,
    "more logits than embeddings": more_logits_than_embeddings,
    "a function among modules": function_among_modules,
    "a derived class whose forward changes the last row": derived(forward=last_row),
}
FAILING = {function_among_modules: pytest.mark.failing_objects}
CASES = [pytest.param(change, id=name, marks=FAILING.get(change, ())) for name, change in CHANGES.items()]


def outcome(model: LlamaForCausalLM) -> Any:
    """Return the tokens of two equal calls, or the error."""
    try:
        return [model.generate(IDS, **GREEDY).tolist() for _ in range(2)]
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("change", CASES)
def test_change_between_calls_falls_back(change):
    both = SideBySide(tiny.llama)
    both.assert_same(outcome)
    both.change(change)
    both.assert_same(outcome, "")
    assert both.accelerated.acceleration.fallback is not None


@pytest.mark.failing_objects
def test_failed_examination_is_logged_with_its_traceback(caplog):
    """The cause could be a fault in this package."""
    model = tr.accelerate(tiny.llama())
    function_among_modules(model)
    outcome(model)
    (record,) = [record for record in caplog.records if "cannot be examined" in record.getMessage()]
    assert record.exc_info
    assert record.exc_info[0] is AttributeError


@pytest.mark.parametrize("change", CASES)
def test_change_before_accelerate_is_rejected_or_falls_back(change):
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
def test_harmless_change_stays_accelerated(change):
    both = SideBySide(tiny.llama)
    both.change(change)
    both.assert_same(outcome)


@pytest.mark.parametrize("place", [0, -1])
def test_processor_can_write_to_the_prompt(place):
    """As in `generate`, processors receive the caller's own tensor before the first token."""

    def write(ids, scores):
        ids[:, place] = (ids[:, place] + 1) % 60
        return scores.roll(int(ids[0, place]) % 3, 1)

    def call(model):
        ids = IDS.clone()
        return model.generate(ids, logits_processor=[write], **GREEDY), ids

    _, written = SideBySide(tiny.llama).assert_same(call)
    assert not torch.equal(written, IDS)


def test_traced_generate_runs_once_per_call(monkeypatch):
    """Tracing tools wrap `generate` in the class. It runs once per call, accelerated or not."""
    calls, generate = [], LlamaForCausalLM.generate

    def traced(model, *args, **arguments):
        calls.append(arguments)
        return generate(model, *args, **arguments)

    both = SideBySide(tiny.llama)
    monkeypatch.setattr(LlamaForCausalLM, "generate", traced)
    both.assert_same(outcome)
    assert len(calls) == 4


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_submodule_stays_accelerated():
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
"""The change to the model, and the reason why the drafter cannot draft afterwards, or None if it can."""


@pytest.mark.parametrize("name", NOT_FITTING)
def test_change_that_does_not_fit_the_drafter(name, tmp_path, caplog):
    change, reason = NOT_FITTING[name]
    both = SideBySide(lambda: tiny.llama(seed=2))
    tr.accelerate(both.accelerated, example(name, both.accelerated, tmp_path))
    both.change(outcome)
    both.change(change)
    both.assert_same(outcome, reason)
    announced = "a vocabulary of 64 tokens, the target has 60: starting again with an empty matrix" in caplog.text
    assert announced == (name in ("published", "recycling", "fuse"))


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
def test_method_set_on_the_class_of_a_model_falls_back(name, derives, monkeypatch):
    """The class is `type(model)`, which is our own class for an accelerated model."""
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


def test_activation_replaced_by_other_torch_functions():
    both = SideBySide(tiny.llama)
    for function, reason in ((torch.tanh, None), (torch.fliplr, ""), (torch.sigmoid, None)):
        for model in (both.plain, both.accelerated):
            for layer in model.model.layers:
                layer.mlp.__dict__["act_fn"] = function
                layer.mlp._modules.pop("act_fn", None)
        both.assert_same(outcome, reason)


def test_replaced_attention_table_of_a_family_falls_back(monkeypatch):
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
def test_changed_setting_of_a_compiled_model():
    """Its forward passes run on a copy without compiled graphs."""
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
def test_subclass_of_the_class_of_an_accelerated_model(derive):
    """Copies and decelerated models have the subclass without our class; `super()` refers to the model's class."""
    both = SideBySide(tiny.llama)
    both.change(lambda model: setattr(model, "__class__", derive(type(model))))
    wanted = both.assert_same(outcome)
    assert outcome(copy.deepcopy(both.accelerated)) == wanted
    assert outcome(tr.decelerate(both.accelerated)) == wanted
    tr.accelerate(both.accelerated)
    both.assert_same(outcome)
