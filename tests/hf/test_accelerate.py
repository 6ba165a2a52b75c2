"""Changes that `accelerate` makes to a model and `decelerate` undoes; options of drafters next to our own arguments;
accelerated models that are saved, pickled and copied.
"""

from __future__ import annotations

import copy
import inspect
import io
import logging
import multiprocessing
import pickle
from typing import Any

import pytest
import torch
from support import tiny
from support.cases import parameter, thinned
from support.drafters import example
from transformers import DynamicCache, LlamaForCausalLM, pipeline

import token_recycling as tr
from token_recycling._util.options import options_of
from token_recycling.drafters._registry import drafter_class

IDS = tiny.prompt(0, 6)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.core
def test_accelerate_keeps_the_class_name_and_decelerate_restores_the_class(model):
    tr.accelerate(model)
    assert type(model) is not LlamaForCausalLM
    assert isinstance(model, LlamaForCausalLM)
    assert (type(model).__name__, type(model).__module__) == ("LlamaForCausalLM", LlamaForCausalLM.__module__)
    twin = copy.copy(model)
    assert type(tr.decelerate(twin)) is LlamaForCausalLM
    assert hasattr(model, "acceleration"), "decelerating a shallow copy must not affect the original"
    assert tr.decelerate(model) is model
    assert type(model) is LlamaForCausalLM
    assert not hasattr(model, "acceleration")
    assert type(tr.decelerate(model)) is LlamaForCausalLM


@pytest.mark.parametrize("within", [tr.decelerate, lambda model: tr.accelerate(model, "suffix")])
@pytest.mark.parametrize("before", [tr.decelerate, tr.accelerate])
def test_accelerated_block_restores_the_model(model, before, within):
    kind, acceleration = type(before(model)), getattr(model, "acceleration", None)
    with tr.accelerated(model, "plain"):
        within(model)
    assert type(model) is kind
    assert getattr(model, "acceleration", None) is acceleration


@pytest.mark.core
def test_accelerated_model_saves_the_same_files(model, tmp_path):
    model.save_pretrained(tmp_path / "plain")
    tr.accelerate(model).generate(IDS, **GREEDY)
    model.save_pretrained(tmp_path / "accelerated")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "accelerated" / name).read_bytes()
    assert type(LlamaForCausalLM.from_pretrained(tmp_path / "accelerated")) is LlamaForCausalLM


@pytest.mark.core
def test_class_of_an_accelerated_model_creates_plain_models(model, tmp_path):
    """Code may load another model through `type(model)`."""
    wanted = model.generate(IDS, max_new_tokens=9)
    made = type(tr.accelerate(model))
    model.save_pretrained(tmp_path)
    for one in (made.from_pretrained(tmp_path), made(model.config)):
        assert type(one) is LlamaForCausalLM
        one.load_state_dict(model.state_dict())
        assert torch.equal(one.eval().generate(IDS, max_new_tokens=9), wanted)


def test_pipeline_returns_the_same_text(tokenizer):
    writer = tiny.llama(4, vocab_size=300)
    plain = pipeline("text-generation", model=writer, tokenizer=tokenizer)(tiny.SENTENCES[0], **GREEDY)
    tr.accelerate(writer)
    assert pipeline("text-generation", model=writer, tokenizer=tokenizer)(tiny.SENTENCES[0], **GREEDY) == plain
    assert writer.acceleration.stats.tokens == 12


class Repeating(LlamaForCausalLM):
    """Overrides `generate` and calls transformers' own."""

    def generate(self, inputs, *, times=1, **arguments):
        return super().generate(inputs.repeat(1, times), **arguments)


def test_overridden_generate_is_called(model):
    wanted = model.generate(IDS.repeat(1, 2), **GREEDY)
    model.__class__ = Repeating
    assert torch.equal(tr.accelerate(model).generate(IDS, times=2, **GREEDY), wanted)
    assert model.acceleration.fallback is None
    assert type(tr.decelerate(model)) is Repeating


class Noting(LlamaForCausalLM):
    """Sets an attribute in a call; a copy lacks another one."""

    calls = 0

    def generate(self, *inputs, **arguments):
        self.calls += self.step
        return super().generate(*inputs, **arguments)

    def __getstate__(self):
        return {name: value for name, value in vars(self).items() if name != "step"}


def test_methods_read_and_set_attributes_of_the_model_itself(model):
    model.__class__, model.step, wanted = Noting, 2, model.generate(IDS, **GREEDY)
    assert torch.equal(tr.generate(model, IDS, **GREEDY), wanted)
    assert model.calls == 2
    assert torch.equal(tr.generate(tr.accelerate(model), IDS, **GREEDY), wanted)
    assert model.calls == 4


class Copying(LlamaForCausalLM):
    """Decodes with a copy of itself."""

    def generate(self, *inputs, **arguments):
        for duplicate in (copy.copy, copy.deepcopy, pickled):
            output = super(Copying, duplicate(self)).generate(*inputs, **arguments)
        return output


def test_methods_can_copy_the_model(model):
    model.__class__, wanted = Copying, model.generate(IDS, **GREEDY)
    for prepare in (lambda model: model, tr.accelerate):
        assert torch.equal(tr.generate(prepare(model), IDS, **GREEDY), wanted)


@pytest.mark.parametrize("accelerate", [tr.accelerate, lambda model: tr.generate(model, IDS)])
@pytest.mark.falls_back
def test_generate_set_on_the_instance_causes_a_warning(model, caplog, accelerate):
    """Such as a repository's `custom_generate`: it is called instead of the accelerated `generate`."""
    model.generate = lambda inputs=None, **arguments: inputs
    with caplog.at_level(logging.WARNING, "token_recycling"):
        accelerate(model)
    assert caplog.records
    assert torch.equal(model.generate(IDS), IDS)


# Options of drafters next to our own arguments

DRAFTED: dict[str, Any] = {"drafter": "draft_model", "mode": "sequence", "depth": 3}


def by_accelerated(model, /, **options):
    with tr.accelerated(model, **options):
        return model.generate(IDS, **GREEDY)


def by_stream(model, /, **options):
    steps = tr.stream(model, input_ids=IDS, max_new_tokens=12, **options)
    return torch.tensor([IDS[0].tolist() + [token for step in steps for token in step.tokens]])


WAYS = [
    lambda model, /, **options: tr.accelerate(model, **options).generate(IDS, **GREEDY),
    by_accelerated,
    by_stream,
]


@pytest.mark.parametrize("way", WAYS)
def test_drafter_can_have_an_option_named_model(model, way):
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(way(model, model=tiny.related(model), **DRAFTED), wanted)


@pytest.mark.parametrize("function", [tr.accelerate, tr.accelerated, tr.stream, tr.make_drafter, tr.generate])
def test_drafter_options_do_not_clash_with_our_arguments(function):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ours = {name for name, given in inspect.signature(function).parameters.items() if given.kind in kinds}
    for name in tr.drafter_names():
        assert not ours & options_of(drafter_class(name)).keys()


@pytest.mark.parametrize(
    ("arguments", "error", "value"),
    [
        ({"input_ids": [3, 4]}, TypeError, "list"),
        *(({"max_new_tokens": new}, ValueError, repr(new)) for new in (0, -1, None, 1.0, 2.5, "1")),
    ],
)
def test_stream_rejects_invalid_arguments(model, arguments, error, value):
    with pytest.raises(error, match=f"got {value}"):
        tr.stream(model, **{"input_ids": IDS, **arguments})


def test_stream_rejects_the_first_id_beyond_the_vocabulary(model):
    vocabulary = model.config.vocab_size
    assert next(tr.stream(model, torch.tensor([vocabulary - 1]))).tokens
    with pytest.raises(ValueError, match=f"from 0 to {vocabulary - 1}, got"):
        tr.stream(model, torch.tensor([vocabulary]))


def test_stream_rejects_a_cache_of_two_sequences(model):
    cache = DynamicCache()
    model(IDS[:, :-1].expand(2, -1), past_key_values=cache)
    with pytest.raises(ValueError, match="1, got 2"):
        tr.stream(model, IDS, past_key_values=cache)


def test_generate_returns_statistics_and_does_not_change_the_model(model):
    output = tr.generate(model, IDS, drafter="published", return_dict_in_generate=True, **GREEDY)
    assert output.stats.tokens == 12
    assert type(model) is LlamaForCausalLM
    # Callers unpack what `generate` returns, field by field, and compare its type.
    plain = model.generate(IDS, return_dict_in_generate=True, **GREEDY)
    assert list(output) == list(plain)
    assert type(output) is type(plain)
    assert pickle.loads(pickle.dumps(output)).stats.tokens == 12


@pytest.mark.falls_back
def test_gradients_equal_those_of_generate(model):
    """Callers may bypass the `no_grad` decorator of `generate` (huggingface/transformers#3720)."""
    generate, losses = inspect.unwrap(type(model).generate), []
    for prepared in (lambda model: model, tr.accelerate):
        output = generate(prepared(model), IDS, return_dict_in_generate=True, output_logits=True, **GREEDY)
        losses.append(torch.cat(output.logits).logsumexp(-1).sum())
    assert torch.equal(*losses)
    assert losses[1].requires_grad
    assert "gradients" in model.acceleration.fallback


# Pickled and copied models keep what the drafter has learned


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def pickled_with_protocol_0(model):
    return pickle.loads(pickle.dumps(model, protocol=0))


def saved_by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", [pickled_with_protocol_0, saved_by_torch, copy.deepcopy])
def test_copied_model_keeps_what_the_drafter_learned(model, way):
    tr.accelerate(model, "published", tree="paper").generate(IDS, **GREEDY)
    twin = way(model)
    assert type(twin) is type(model)
    ours, own = twin.acceleration, model.acceleration
    assert torch.equal(ours.drafter.matrix.candidates, own.drafter.matrix.candidates)
    assert ours.drafter is not own.drafter
    assert ours.total.as_dict() == own.total.as_dict()
    assert torch.equal(twin.generate(IDS, **GREEDY), model.generate(IDS, **GREEDY))
    assert ours.stats.steps == own.stats.steps < 12
    assert type(tr.decelerate(twin)) is LlamaForCausalLM
    assert hasattr(model, "acceleration")


class CopyingByHand(LlamaForCausalLM):
    """Copies as Python's documentation and `torch.nn.DataParallel` do."""

    def __deepcopy__(self, memo):
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__ = {name: copy.deepcopy(value, memo) for name, value in vars(self).items()}
        return twin

    def generate(self, *inputs, **arguments):
        return super(CopyingByHand, copy.deepcopy(self)).generate(*inputs, **arguments)


def test_model_that_copies_itself_by_hand(model):
    model.__class__, wanted = CopyingByHand, model.generate(IDS, **GREEDY)
    assert torch.equal(tr.generate(model, IDS, **GREEDY), wanted)
    twin = copy.deepcopy(tr.accelerate(model))
    assert type(twin) is type(model)
    assert torch.equal(twin.generate(IDS, **GREEDY), wanted)
    with pytest.raises(TypeError, match="config"):
        type(twin)()


class Reducing(LlamaForCausalLM):
    """Defines how it is copied."""

    def __reduce__(self):
        return tiny.llama, (1,)


@pytest.mark.parametrize("way", [pickled, copy.copy, copy.deepcopy])
def test_model_that_defines_how_it_is_copied(model, way):
    model.__class__ = Reducing
    twin = way(tr.accelerate(model))
    assert type(twin) is LlamaForCausalLM
    assert torch.equal(twin.lm_head.weight, tiny.llama(1).lm_head.weight)


@pytest.mark.parametrize("name", thinned(tr.drafter_names(), kept=("recycling", "medusa").__contains__))
def test_every_drafter_can_be_pickled_and_copied(model, name, tmp_path):
    """Before its first sequence and after it."""
    wanted = model.generate(IDS, **GREEDY)
    tr.accelerate(model, example(name, model, tmp_path))
    for way in (pickled, copy.deepcopy, pickled):
        model = way(model)
        assert torch.equal(model.generate(IDS, **GREEDY), wanted)
        assert model.acceleration.fallback is None
        assert model.acceleration.stats.drafter.startswith(name)


@pytest.mark.nightly
def test_another_process_decodes_with_a_pickled_model(model):
    """A spawned process has not created the accelerated class yet."""
    wanted = tr.accelerate(model, "published", tree="paper").generate(IDS, **GREEDY)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        ours = pool.apply(model.generate, (IDS,), {**GREEDY, "return_dict_in_generate": True})
    assert torch.equal(ours.sequences, wanted)
    assert 0 < ours.stats.steps < 12


# Classes that other libraries derive from the model's class


class Wrapping:
    """A mixin before the model's class, like FSDP2's `FSDPModule`."""


def wrapped(model):
    """Swap the class as FSDP2 does."""
    kind = type(model)
    model.__class__ = type(f"FSDP{kind.__name__}", (Wrapping, kind), {"wraps": True})


def parametrized(model):
    """Swap the class as parametrizations of a root module do."""
    kind = type(model)
    model.__class__ = type(f"Parametrized{kind.__name__}", (kind,), {"parametrized": True})


def twice(model):
    wrapped(model)
    parametrized(model)


@pytest.mark.parametrize(
    ("swap", "before"),
    [(twice, False), (twice, True), (parametrized, False), parameter(wrapped, True, every_run=False)],
)
def test_swapped_class_can_be_decelerated(model, swap, before):
    plain = model.generate(IDS, **GREEDY)
    if before:
        swap(model)
    own = type(model)
    tr.accelerate(model)
    if not before:
        swap(model)
    assert torch.equal(model.generate(IDS, **GREEDY), plain)
    assert model.acceleration.fallback is None
    assert tr.decelerate(model) is model
    assert not hasattr(model, "acceleration")
    assert isinstance(model, own)
    assert [kind.__name__ for kind in type(model).__mro__].count("LlamaForCausalLM") == 1
    assert isinstance(model, Wrapping) == (swap is not parametrized)
    assert torch.equal(model.generate(IDS, **GREEDY), plain)
    assert torch.equal(tr.accelerate(model).generate(IDS, **GREEDY), plain)


def test_decelerate_keeps_a_class_that_replaced_the_accelerated_one(model):
    tr.accelerate(model)
    model.__class__ = Repeating
    assert type(tr.decelerate(model)) is Repeating
    assert not hasattr(model, "acceleration")
    tr.accelerate(model)
    model.__class__ = Repeating
    assert tr.accelerate(model).generate(IDS, times=2, max_new_tokens=1).shape == (1, 13)


class Sealed(LlamaForCausalLM):
    """Allows no subclasses, like a class of a registry that requires a name."""

    def __init_subclass__(cls, **_):
        raise TypeError("sealed")


REFUSED = {
    "sealed": lambda model: setattr(model, "__class__", Sealed),
    "an attribute": lambda model: setattr(model, "acceleration", 9.81),
    "a module": lambda model: setattr(model, "acceleration", torch.nn.Identity()),
}


@pytest.mark.parametrize("use", [tr.accelerate, lambda model: tr.generate(model, IDS, **GREEDY)])
@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_refused_model_is_left_as_it_is(model, change, use):
    change(model)
    kind, names = type(model), [*vars(model)]
    with pytest.raises(tr.UnsupportedModelError, match=r"sealed|acceleration"):
        use(model)
    assert (type(model), [*vars(model)]) == (kind, names)


@pytest.mark.falls_back
def test_model_that_allows_no_new_attributes(model):
    def refuse(self, name, value):
        raise AttributeError(name)

    model.__class__ = type("Frozen", (LlamaForCausalLM,), {"__setattr__": refuse, "__delattr__": refuse})
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(tr.accelerate(model).generate(IDS, **GREEDY), wanted)
    assert not hasattr(tr.decelerate(model), "acceleration")


def test_model_is_examined_again_only_after_a_change(model):
    tr.accelerate(model)
    target = model.acceleration.target
    assert target is not None
    for _ in range(2):
        model.generate(IDS, **GREEDY)
        assert model.acceleration.target is target
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.generate(IDS, **GREEDY)
    assert model.acceleration.target is not target
    assert copy.deepcopy(model).acceleration.target is None


@pytest.mark.falls_back
def test_model_that_is_no_longer_supported_falls_back_to_generate(model, monkeypatch):
    """The fallback names the reason; `accelerate` itself rejects such a model."""

    def refuse(*_):
        raise tr.UnsupportedModelError("another model by now")

    wanted = model.generate(IDS, **GREEDY)
    tr.accelerate(model)
    model.config.bos_token_id = 2  # or anything else
    for module in ("accelerate", "acceleration"):
        monkeypatch.setattr(f"token_recycling.hf.{module}.ready", refuse)
    assert torch.equal(model.generate(IDS, **GREEDY), wanted)
    assert model.acceleration.fallback == "another model by now"
    with pytest.raises(tr.UnsupportedModelError, match="another model by now"):
        tr.accelerate(tiny.llama())


@pytest.mark.parametrize("options", [{"reproducible": "no"}, {"reproducible": 1}, {"prepack": "no"}, {"prepack": 0}])
def test_switches_must_be_booleans(options):
    (name,) = options
    with pytest.raises(TypeError, match=f"{name} must be True"):
        tr.accelerate(tiny.llama(), **options)
