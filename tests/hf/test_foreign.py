"""Foreign code in a model: hooks, adapters, overridden methods, modes. Output equals that of plain `generate`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import operator
import os
import queue
import threading
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import transformers
from peft.tuners.lora import LoraLayer
from support import tiny
from support.architectures import SUPPORTED, model_of
from support.batches import batch
from support.cases import paired, parameter, thinned
from support.further_architectures import FURTHER
from support.side_by_side import SideBySide, assert_same
from torch.nn.utils import parametrizations
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    HubertConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.integrations.neftune import activate_neftune
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.bert.modeling_bert import BertIntermediate
from transformers.models.hubert.modeling_hubert import HubertPositionalConvEmbedding
from transformers.models.llama import modeling_llama

import token_recycling as tr
from token_recycling.model.foreign import trial

pytestmark = pytest.mark.falls_back

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
IDS = torch.cat([tiny.prompt(1, 9)[:, :8], torch.tensor([[7]])], dim=1)
BATCH = torch.cat([IDS, tiny.prompt(2, 9)])
LOGGER = transformers.utils.logging.get_logger("tests")
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(5))

Bring = Callable[[], Any]


def llama(kind: type = LlamaForCausalLM, **config: Any) -> LlamaForCausalLM:
    model = tiny.llama(0, 0.3, **config)
    model.__class__ = kind
    return model


def greedy(model: Any) -> torch.Tensor:
    return model.generate(IDS, **GREEDY)


def compare(bring: Bring, reason: str | None, ids: torch.Tensor = IDS, **arguments: Any) -> None:
    """Compare two calls of a plain and of an accelerated model."""
    both = SideBySide(bring)
    both.assert_same(lambda model: model.generate(ids, **{**GREEDY, **arguments}), reason, times=2)
    assert reason is not None or both.base.acceleration.stats.steps


# Hooks


def everywhere(module, inputs, output):
    return output + VECTOR


def last(module, inputs, output):
    return torch.cat([output[:, :-1], output[:, -1:] + VECTOR], 1)


def one_row(module, inputs, output):
    return output + VECTOR if output.shape[1] == 1 else output


def several_rows(module, inputs, output):
    return output + VECTOR if output.shape[1] > 1 else output


def many_rows(module, inputs, output):
    return output + VECTOR if output.shape[1] > 50 else output


def exactly_nine_rows(module, inputs, output):
    return output + VECTOR if output.shape[1] == 9 else output


def far_in_the_pass(module, inputs, kwargs, output):
    """Change all rows of a forward pass that goes beyond a position."""
    return output + VECTOR * (kwargs["position_ids"].max() > 12)


def beyond_a_fraction(module, inputs, kwargs, output):
    """As `far_in_the_pass`, but name no integer that a trial could try as a length."""
    return output + VECTOR if kwargs["position_ids"].max() > 30.5 else output


def at_mean_position(module, inputs, kwargs, output):
    return output + VECTOR * torch.sigmoid(10 * (kwargs["position_ids"].float().mean() - 30.5))


def of_a_large_state(module, inputs, output):
    """Change all rows of a forward pass if one state is large. In short sequences none is."""
    return output + VECTOR if bool((output > 4.5).any()) else output


def of_each_large_state(module, inputs, output):
    return torch.where(output > 4.5, output + VECTOR, output)


def by_large_columns(module, inputs, output):
    """Round columns unless one of their rows is large, as some quantized layers do."""
    large = (output.abs() > 9).any(dim=1, keepdim=True)
    return torch.where(large, output, output.mul(2).round().div(2))


def along(module, inputs, output):
    return output + 0.1 * torch.arange(output.shape[1])[:, None] * VECTOR


def mean(module, inputs, output):
    return output + output.mean(dim=1, keepdim=True)


def trigger(module, inputs, output):
    return output + VECTOR if (inputs[0] == 7).any() else output


def third_trigger(module, inputs, output):
    """Name three tokens, of which only the last changes other rows."""
    harmless = (inputs[0] == 2) | (inputs[0] == 4)
    return output + VECTOR if (inputs[0] == 12).any() else output + VECTOR * harmless[..., None]


def by_token(module, inputs, output):
    return output + VECTOR * (inputs[0] == 7)[..., None]


def by_position(module, inputs, kwargs, output):
    return output + VECTOR * (kwargs["position_ids"] % 2)[..., None]


@contextlib.contextmanager
def unchanged():
    yield


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def count(self, module, inputs, output):
        self.calls += 1

    def first(self, module, inputs, output):
        self.calls += 1
        return output + VECTOR if self.calls == 1 else output


def counted():
    numbers = itertools.count()
    return lambda module, inputs, output: output + VECTOR if next(numbers) % 2 else output


def hooked(make: Callable[[], Any], path: str = "model.layers.0", **options: Any) -> Bring:
    def bring():
        model = llama()
        model.get_submodule(path).register_forward_hook(make(), **options)
        return model

    return bring


def pre_hooked(make: Callable[[], Any], path: str) -> Bring:
    def bring():
        model = llama()
        model.get_submodule(path).register_forward_pre_hook(make())
        return model

    return bring


def by_odd_tensors():
    """Use a complex and an empty tensor."""
    model = llama()
    layer = model.model.layers[0]
    layer.register_buffer("table", torch.tensor([3 + 4j, 1j]))
    layer.register_buffer("nothing", torch.empty(0))
    layer.register_forward_hook(
        lambda module, inputs, output: output + (module.table.abs().sum() + module.nothing.sum()) * VECTOR
    )
    return model


def by_a_number():
    model, strength = llama(), torch.tensor(2.0)
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output + strength * VECTOR)
    return model


def masking(value: float, hook: Callable[..., Any] = everywhere, dtype: torch.dtype = torch.float32) -> Bring:
    """Make a hook on a layer, and one that rules out all but a few tokens."""

    def bring():
        model = hooked(lambda: lambda m, i, o: hook(m, i, o).to(dtype))().to(dtype)
        mask = torch.full((64,), value, dtype=dtype).index_fill_(0, IDS[0], 0)
        model.lm_head.register_forward_hook(lambda m, i, o: o + mask)
        return model

    return bring


def one_hot():
    model = hooked(lambda: last)()
    model.lm_head.register_forward_hook(lambda m, i, o: torch.nn.functional.one_hot(o.argmax(-1), 64).float())
    return model


def by_proxy():
    model = llama()
    layer = weakref.proxy(model.model.layers[1])
    model.model.layers[0].register_forward_hook(lambda m, i, o: o * layer.mlp.down_proj.weight.norm())
    return model


def by_a_function_of_its_module():
    model = llama()
    model.model.layers[0].rotate = lambda output: last(None, None, output)
    model.model.layers[0].register_forward_hook(lambda m, i, o: m.rotate(o))
    return model


def last_input(module, inputs):
    return (torch.cat([inputs[0][:, :-1], inputs[0][:, -1:] + VECTOR], 1),)


MASKS = (-math.inf, torch.finfo(torch.float32).min, -1e9)
HOOKS: dict[str, tuple[Bring, str | None]] = {
    "everywhere": (hooked(lambda: everywhere), None),
    "by a complex and an empty tensor": (by_odd_tensors, None),
    "by a scalar tensor": (by_a_number, None),
    "everywhere, on the output layer": (hooked(lambda: lambda m, i, o: o.roll(1, -1), "lm_head"), None),
    "by token": (hooked(lambda: by_token, "model.embed_tokens"), None),
    "by position": (hooked(lambda: by_position, with_kwargs=True), None),
    "counting": (hooked(lambda: Counter().count), "a Counter, which may change"),
    "printing": (hooked(lambda: lambda m, i, o: print(o.shape)), "uses print"),
    "logging": (hooked(lambda: lambda m, i, o: LOGGER.info("%s", o.shape)), "logs its calls (info)"),
    "logging by its module": (hooked(lambda: lambda m, i, o: logging.debug(o.shape)), "logs its calls (debug)"),
    "a warning that is logged once": (hooked(lambda: lambda m, i, o: LOGGER.warning_once("slow")), None),
    "a partial of print": (hooked(lambda: functools.partial(print, end="")), "print"),
    "a queue": (hooked(lambda: queue.Queue().put), "put"),
    "a mock": (hooked(lambda: mock.Mock(return_value=None)), "a Mock, which may change"),
    "a list of shapes": (hooked(lambda: lambda m, i, o, seen=[]: seen.append(o.shape)), "a list"),
    "last row": (hooked(lambda: last), "forward hook last (tests.hf.test_foreign) on model.layers.0"),
    "last row, in another module": (hooked(lambda: last, "model.layers.1.mlp"), "on model.layers.1.mlp"),
    "last row of logits": (hooked(lambda: lambda m, i, o: torch.cat([o[:, :-1], -o[:, -1:]], 1), "lm_head"), "lm_head"),
    "more logits": (
        hooked(lambda: lambda m, i, o: torch.cat([o, o[..., :5]], -1), "lm_head"),
        "69 logits for a vocabulary of 64",
    ),
    "one row": (hooked(lambda: one_row, "model.norm"), "one_row"),
    "several rows": (hooked(lambda: several_rows), "several_rows"),
    "many rows": (hooked(lambda: many_rows), "many_rows"),
    "of a large state": (hooked(lambda: of_a_large_state), "of_a_large_state branches"),
    "of a large number": (
        hooked(lambda: lambda m, i, o: o + VECTOR if o.max().item() > 99.5 else o, "lm_head"),
        "branches for all rows",
    ),
    "of each large state": (hooked(lambda: of_each_large_state), None),
    "by large columns": (hooked(lambda: by_large_columns), "where other nodes are large"),
    "exactly nine rows": (hooked(lambda: exactly_nine_rows), "exactly_nine_rows"),
    "far in the pass": (hooked(lambda: far_in_the_pass, with_kwargs=True), "far_in_the_pass"),
    "beyond a fraction": (hooked(lambda: beyond_a_fraction, with_kwargs=True), "at distant positions"),
    "at the mean position": (hooked(lambda: at_mean_position, with_kwargs=True), "at distant positions"),
    "along the pass": (hooked(lambda: along), "along"),
    "mean of the pass": (hooked(lambda: mean, "model.layers.0.self_attn.q_proj"), "mean"),
    "trigger": (hooked(lambda: trigger, "model.embed_tokens"), "trigger"),
    "the third trigger": (hooked(lambda: third_trigger, "model.embed_tokens"), "third_trigger"),
    "partial": (hooked(lambda: functools.partial(last)), "last"),
    "decorated by a context manager": (hooked(lambda: unchanged()(last)), "last"),
    "alternating by an iterator": (hooked(counted), "counted"),
    "the first pass": (hooked(lambda: Counter().first), "first"),
    "by a function of its module": (by_a_function_of_its_module, "between a tree and single tokens"),
    "by a weak proxy": (by_proxy, "a CallableProxyType, which may change"),
    **{f"mask of {value:.0e}": (masking(value), None) for value in MASKS},
    **{f"mask of {value:.0e}, last row": (masking(value, last), "between a tree and single tokens") for value in MASKS},
    "one token of each row": (one_hot, "all logits are equal"),
    "before a module": (pre_hooked(lambda: last_input, "model.layers.1.mlp"), "last_input"),
}


def singly_and_in_batches(cases: dict[str, tuple[Bring, str | None]]) -> pytest.MarkDecorator:
    """Run each case with one sequence, and in a batch if it is accelerated: a case that falls back for one sequence
    falls back for several, too. Every run has half of the calls with one sequence and a quarter of the batches.
    """
    calls = [
        parameter(bring, reason, ids, every_run=place % (2 if ids is IDS else 4) == 0, id=f"{name}-{rows}")
        for place, (name, (bring, reason)) in enumerate(cases.items())
        for rows, ids in (("single", IDS), ("batch", BATCH))
        if reason is None or ids is IDS
    ]
    return pytest.mark.parametrize(("bring", "reason", "ids"), calls)


@singly_and_in_batches(HOOKS)
def test_hooks_match_generate(bring, reason, ids):
    compare(bring, reason, ids)


def across(module, inputs, output):
    return output + 0.5 * output.mean(dim=0, keepdim=True)


def alone(module, inputs, output):
    return output + VECTOR if output.shape[0] == 1 else output


@pytest.mark.parametrize("ends", thinned([list(range(0, 60, 3)), None], 2))
def test_hooks_that_depend_on_the_batch(ends):
    for ids in (IDS, BATCH):
        compare(hooked(lambda: alone), None, ids, eos_token_id=ends)
        compare(hooked(lambda: across), None if len(ids) == 1 else "other sequences", ids, eos_token_id=ends)


def test_hooks_added_and_removed_between_calls():
    both = SideBySide(llama)
    for hook, reason in [(last, "last"), (everywhere, None), (one_row, "one_row")] * 2:
        plain = both.assert_same(greedy)
        handles = both.change(lambda model: model.model.layers[1].register_forward_hook(hook))  # noqa: B023
        wanted = both.assert_same(greedy, reason, times=2)
        assert not torch.equal(wanted, plain)
        assert torch.equal(tr.generate(both.accelerated, IDS, **GREEDY), wanted)
        for handle in handles:
            handle.remove()


def test_hook_with_the_name_of_a_transformers_module_falls_back():
    """`functools.wraps` copies the module name of the wrapped function, and some hooks of transformers only observe."""

    def named(module, inputs, output):
        return last(module, inputs, output)

    named.__module__ = "transformers.utils.output_capturing"
    compare(hooked(lambda: named), "named")


@pytest.mark.parametrize("name", ["chat", "reward", "generate"])
def test_functions_outside_the_forward_pass_can_keep_state(name):
    """Scripts and libraries set such functions on a model."""
    both = SideBySide(llama)
    asked = both.change(lambda model: _counting(model, name))
    both.assert_same(greedy, times=2)
    assert asked == [[2 * (name == "generate")]] * 2


def _counting(model: Any, name: str) -> list[int]:
    generate, asked = model.generate, [0]

    def counting(*inputs: Any, **arguments: Any) -> Any:
        asked[0] += 1
        return generate(*inputs, **arguments)

    setattr(model, name, counting)
    return asked


def test_global_hook_falls_back():
    model = llama()

    def end_of_output(module, inputs, output):
        return last(module, inputs, output) if module is model.model.layers[1] else None

    tr.accelerate(model)
    handle = torch.nn.modules.module.register_module_forward_hook(end_of_output)
    try:
        ours = model.generate(IDS, **GREEDY)
        assert "the global forward hook" in str(model.acceleration.fallback)
        assert torch.equal(ours, tr.decelerate(model).generate(IDS, **GREEDY))
    finally:
        handle.remove()


def test_stream_rejects_a_foreign_hook(model):
    model.model.layers[0].register_forward_hook(last)
    with pytest.raises(tr.UnsupportedModelError, match="forward hook last"):
        tr.stream(model, IDS)


def test_trial_does_not_change_the_state_of_hooks():
    """A trial leaves counters unchanged."""
    counter = Counter()
    model = llama()
    model.model.layers[0].register_forward_hook(counter.first)
    tr.accelerate(model)
    model.generate(IDS, **GREEDY)
    assert counter.calls == GREEDY["max_new_tokens"]


def beyond_a_count(count):
    """Make a hook that changes all rows if a count exceeds 3, which it does in no trial."""
    return hooked(lambda: lambda module, inputs, output: output + VECTOR if count(output) > 3 else output)


COUNTS = {
    "a length": lambda states: len((states > 6).nonzero()),
    "an integer": lambda states: int((states > 6).sum()),
    "an item": lambda states: (states > 6).sum().item(),
    "a list": lambda states: sum((states > 6).sum(-1).flatten().tolist()),
    "a shape": lambda states: torch.argwhere(states > 6).shape[0],
    "indices": lambda states: torch.where(states > 6)[0].numel(),
    "a mask": lambda states: states[states > 6].numel(),
    "a NumPy array": lambda states: int((states.numpy() > 6).sum()),
    "a string": lambda states: float(f"{(states > 6).sum()}"),
}


@pytest.mark.parametrize("count", COUNTS.values(), ids=COUNTS)
def test_hooks_that_branch_on_a_count_fall_back(count):
    compare(beyond_a_count(count), "branches for all rows")


MANY = 900


def beyond_many(limit=MANY):
    return {
        "a number": lambda module, inputs, output: output + VECTOR if output.shape[1] > 900 else output,
        "a slice": lambda module, inputs, output: torch.cat([output[:, :900], output[:, 900:] + VECTOR], 1),
        "a global": lambda module, inputs, output: output + VECTOR if len(output[0]) >= MANY else output,
        "a variable": lambda module, inputs, output: output + VECTOR if output.size(1) > limit else output,
    }


class Beyond(torch.nn.Module):
    """A module that scales its states in forward passes longer than `longest`."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def forward(self, states):
        return 3 * states if states.shape[1] > self.longest else states


@pytest.mark.parametrize("name", thinned([*beyond_many(), "a module"], 2))
def test_code_that_changes_only_long_prompts_falls_back(name):
    """Prompts longer than those of trials."""

    def bring(**config):
        model = llama(**config)
        if name == "a module":
            model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Beyond(900))
        else:
            model.model.layers[0].register_forward_hook(beyond_many()[name])
        return model

    ids, longer = tiny.prompt(2, 950), {**GREEDY, "max_new_tokens": 10}
    long = functools.partial(bring, max_position_embeddings=2048)
    assert not torch.equal(long().generate(ids, **longer), llama(max_position_embeddings=2048).generate(ids, **longer))
    compare(long, "it names 900", ids, **longer)
    compare(functools.partial(bring, max_position_embeddings=512), None)


def test_trial_fits_into_a_short_context():
    def bring():
        torch.manual_seed(0)
        model = tiny.gpt2(n_positions=20).eval()
        model.transformer.h[0].register_forward_hook(everywhere)
        return model

    compare(bring, None, max_new_tokens=8)


def test_lists_filled_by_hooks_equal_those_of_generate():
    def appending(model):
        rows = []
        model.model.layers[0].register_forward_hook(lambda module, inputs, output: rows.append(inputs[0].shape))
        model.model.layers[1].mlp.register_forward_pre_hook(lambda module, inputs: rows.extend(inputs[0].shape))
        return rows

    both = SideBySide(llama)
    rows = both.change(appending)
    both.assert_same(greedy, "a list", times=2)
    assert rows[0] == rows[1] != []


@pytest.mark.parametrize("hook", [everywhere, last])
@pytest.mark.parametrize("mask", [0.0, -1e4])
def test_hooks_in_bfloat16(hook, mask):
    model = tr.accelerate(masking(mask, hook, torch.bfloat16)())
    model.generate(IDS, **GREEDY)
    assert (model.acceleration.fallback is None) == (hook is everywhere)


@pytest.mark.parametrize("rows", ["every", "last"])
def test_hook_that_favors_one_token_in_bfloat16(rows):
    """One of many logits differs, so the mean difference is small."""
    model = tiny.llama(0, 0.3, vocab_size=4096).to(torch.bfloat16)
    bias = torch.zeros(4096, dtype=torch.bfloat16).index_fill_(0, torch.tensor(7), 5)
    hook = {"every": lambda m, i, o: o + bias, "last": lambda m, i, o: torch.cat([o[:, :-1], o[:, -1:] + bias], 1)}
    model.lm_head.register_forward_hook(hook[rows])
    tr.accelerate(model).generate(IDS, **GREEDY)
    assert (model.acceleration.fallback is None) == (rows == "every")


def test_hook_of_a_quantized_model_falls_back():
    both = SideBySide(llama)
    both.change(lambda model: setattr(model, "is_quantized", True))
    both.change(lambda model: model.model.layers[0].register_forward_hook(last))
    both.assert_same(greedy, "forward hook last")


def test_unknown_family_fails_its_self_test_only_with_a_hook():
    model = tiny.unknown(llama())
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(64).index_fill(0, torch.arange(60, 64), -1e9))  # padding
    handle = model.model.layers[0].register_forward_hook(last)
    with pytest.raises(tr.UnsupportedModelError, match="it runs the forward hook last"):
        tr.accelerate(model)
    handle.remove()
    wanted = model.generate(IDS, **GREEDY)
    assert torch.equal(tr.accelerate(model).generate(IDS, **GREEDY), wanted)
    assert model.acceleration.fallback is None


# Settings


class Holder:
    """An object with attributes, as in users' code."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


SETTINGS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "attribute": (lambda model: Holder(on=False), lambda settings, on: setattr(settings, "on", on)),
    "nested": (lambda model: Holder(of=Holder(on=False)), lambda settings, on: setattr(settings.of, "on", on)),
    "dictionary": (lambda model: {"a": {"on": False}}, lambda settings, on: settings["a"].update(on=on)),
    "context": (lambda model: ContextVar("on", default=False), lambda settings, on: settings.set(on)),
    "thread": (lambda model: _local(), lambda settings, on: setattr(settings, "on", on)),
    "module": (lambda model: model.model.norm, lambda settings, on: setattr(settings, "on", on)),
    "environment": (lambda model: "STEERING_ON", lambda name, on: os.environ.update({name: "1" if on else ""})),
}


def _local():
    local = threading.local()
    local.on = False
    return local


def _is_on(settings: Any) -> bool:
    if isinstance(settings, str):
        return bool(os.environ.get(settings))
    if isinstance(settings, ContextVar):
        return settings.get()
    if isinstance(settings, dict):
        return settings["a"]["on"]
    return getattr(getattr(settings, "of", settings), "on", False)


@pytest.mark.parametrize(("make", "put"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_change_between_calls(make, put, monkeypatch):
    """Code is tried again after a change of anything that it reads, however indirectly."""
    monkeypatch.setenv("STEERING_ON", "")
    outputs = []
    for prepare in (lambda model: model, tr.accelerate):
        model = llama()
        settings = make(model)

        def hook(module, inputs, output, settings=settings):
            return last(module, inputs, output) if _is_on(settings) else output

        model.model.layers[0].register_forward_hook(hook)
        prepare(model)
        for on in (False, True, False):
            put(settings, on)
            outputs.append(greedy(model))
    assert_same(outputs[3:], outputs[:3])
    assert not torch.equal(outputs[0], outputs[1])


class Switched(torch.nn.Module):
    on = False

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("switch", torch.zeros(1))

    def forward(self, states):
        states = self.inner(states)
        return last(self, None, states) if self.on or self.switch > 0 else states


SWITCH = False


@pytest.mark.parametrize("of", ["class", "module", "buffer", "function", "globals"])
def test_plain_settings_that_change_between_calls(of, monkeypatch):
    """Code is accelerated while its settings make it treat all rows alike."""
    is_on = False

    def hook(module, inputs, output):
        return last(module, inputs, output) if SWITCH or is_on else output

    def bring():
        model = llama()
        layer = model.model.layers[0]
        if of in ("function", "globals"):
            layer.register_forward_hook(hook)
        else:
            layer.mlp = Switched(layer.mlp)
        return model

    def put(model, on):
        nonlocal is_on
        mlp = model.model.layers[0].mlp
        if of == "function":
            is_on = on
        elif of == "buffer":
            mlp.switch.fill_(on)
        elif of == "globals":
            monkeypatch.setitem(globals(), "SWITCH", on)
        else:
            monkeypatch.setattr(mlp if of == "module" else Switched, "on", on)

    both, outputs = SideBySide(bring), []
    for on, reason in ((False, None), (True, "model.layers.0"), (False, None)):
        both.change(lambda model: put(model, on))  # noqa: B023
        outputs.append(both.assert_same(greedy, reason))
    assert not torch.equal(outputs[0], outputs[1])


def scaled(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.5


def by_last(function):
    return lambda *args, **kwargs: last(None, None, function(*args, **kwargs))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("model.layers.0.mlp", "act_fn"),
        ("model.layers.0.mlp", "down_proj"),
        ("model.layers.0", "input_layernorm"),
        ("model", "norm"),
    ],
)
def test_function_replaced_between_calls(path, name):
    """The function replaces a submodule, so the parent has as many attributes as before."""

    def bring():
        model = llama(intermediate_size=32)
        holder = model.get_submodule(path)
        holder.kept = getattr(holder, name)
        delattr(holder, name)
        put(model, scaled)
        return model

    def put(model, change):
        holder = model.get_submodule(path)
        setattr(holder, name, change(holder.kept))

    both = SideBySide(bring)
    before = both.assert_same(greedy)
    both.change(lambda model: put(model, by_last))
    assert not torch.equal(both.assert_same(greedy, f"set as {name}"), before)
    both.change(lambda model: put(model, scaled))
    both.assert_same(greedy)


class Scaled(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, scale=2.0, **rest):
        return {**super().prepare_inputs_for_generation(input_ids, **rest)}


def test_method_without_an_attention_mask_is_accelerated():
    """A `prepare_inputs_for_generation` that does not name the mask still passes it on."""
    compare(lambda: llama(Scaled), None)


# Methods


def wrapped(function: Callable[..., Any], change: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def forward(*args, **kwargs):
        return change(function(*args, **kwargs))

    return forward


def with_forward(path: str, change: Callable[[Any], Any], **attributes: Any) -> Bring:
    def bring():
        model = llama()
        module = model.get_submodule(path)
        vars(module).update(attributes)
        module.forward = wrapped(module.forward, change)
        return model

    return bring


class Shifted(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] + 1) % 64
        return inputs


class NotTwice(LlamaForCausalLM):
    """Reads another token in place of a repeated one."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        repeated = input_ids[:, -1:] == input_ids[:, -2:-1]
        return {**inputs, "input_ids": torch.where(repeated, 0, inputs["input_ids"])}


class Scaling(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {**super().prepare_inputs_for_generation(input_ids, **kwargs), "scale": -1.0}

    def forward(self, *args, scale=1.0, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * scale
        return output


class Preparing(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


class Counting(LlamaForCausalLM):
    """Changes every sixth token, by a count among the call's arguments."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        count = model_kwargs.get("count", 0) + 1
        return {**super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs), "count": count}

    def prepare_inputs_for_generation(self, input_ids, count=0, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + (count % 6 == 5)) % 64}


class Sampling(LlamaForCausalLM):
    def _sample(self, input_ids, **kwargs):
        return torch.cat([input_ids, input_ids], dim=1)


class Suppress(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.arange(0, 64, 2), float("-inf"))


class Processing(LlamaForCausalLM):
    def _get_logits_processor(self, *args, **kwargs):
        return LogitsProcessorList([*super()._get_logits_processor(*args, **kwargs), Suppress()])


class Stopping(LlamaForCausalLM):
    def _get_stopping_criteria(self, *args, **kwargs):
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        criteria.append(lambda ids, scores, **kwargs: torch.full((len(ids),), ids.shape[1] >= 14))
        return criteria


class Passing(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class Logging(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(*args, **kwargs)


class LastLogits(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        return CausalLMOutputWithPast(logits=output.logits[:, -1:], past_key_values=output.past_key_values)


class AllLogits(LlamaForCausalLM):
    def forward(self, *args, logits_to_keep=0, **kwargs):
        return super().forward(*args, **kwargs)


class OneToken(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        output = super().forward(input_ids=input_ids, **kwargs)
        if input_ids.shape[1] == 1:
            output.logits = -output.logits
        return output


class Softcapped(torch.nn.Module):
    def forward(self, logits):
        return 3 * torch.tanh(logits / 3)


class LastRow(torch.nn.Module):
    def forward(self, states):
        return states[:, -1:]


class NewTokens(torch.nn.Module):
    """Embeds some tokens by a table of its own, and the others by the model's; has no weight of its own."""

    def __init__(self, embedding: torch.nn.Module) -> None:
        super().__init__()
        self.embedding, self.own = embedding, torch.nn.Embedding.from_pretrained(VECTOR[None])

    def forward(self, ids):
        return torch.where((ids % 9 == 8)[..., None], self.own(ids * 0), self.embedding(ids))


def with_new_tokens() -> LlamaForCausalLM:
    model = llama()
    model.set_input_embeddings(NewTokens(model.get_input_embeddings()))
    return model


def with_head(*modules: torch.nn.Module, before: bool = False) -> Bring:
    """Make a model with a wrapped output layer; the wrapper has neither a weight nor a width."""

    def bring():
        model = llama()
        parts = [*modules, model.lm_head] if before else [model.lm_head, *modules]
        model.lm_head = torch.nn.Sequential(*parts)
        return model

    return bring


class Experts(torch.nn.Module):
    """Experts that each take the first `capacity` rows of a forward pass and drop the others."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.router = torch.nn.Linear(32, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, states):
        rows = states.reshape(-1, 32)
        chosen, output = self.router(rows).argmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            taken = (chosen == number).nonzero().flatten()[: self.capacity]
            output = output.index_add(0, taken, 3 * expert(rows[taken]))
        return output.view_as(states)


def with_mlp(*modules: Callable[[], torch.nn.Module], training: bool = False) -> Bring:
    """Make a model with torch modules after its first MLP."""

    def bring():
        model = llama()
        torch.manual_seed(3)
        mlp = torch.nn.Sequential(model.model.layers[0].mlp, *(make() for make in modules))
        model.model.layers[0].mlp = mlp.train(training)
        return model

    return bring


def over_rows(make: Callable[[], torch.nn.Module]) -> tuple[Callable[[], torch.nn.Module], ...]:
    """Return constructors that apply a torch module to all rows as to an image."""
    return lambda: torch.nn.Unflatten(1, (1, -1)), make, lambda: torch.nn.Flatten(1, 2)


def with_activation(make: Callable[[], torch.nn.Module]) -> Bring:
    def bring():
        model = llama()
        model.model.layers[0].mlp.act_fn = make()
        return model

    return bring


def with_function(path: str, name: str, function: Callable[..., Any]) -> Bring:
    """Make a model with a torch function in place of a method or of a module."""

    def bring():
        model = llama()
        module = model.get_submodule(path)
        if name in dict(module.named_children()):
            delattr(module, name)
        setattr(module, name, function)
        return model

    return bring


def with_partial(path: str, **given: Any) -> Bring:
    """Make a model with fixed arguments of one of its methods."""

    def bring():
        model = llama()
        module = model.get_submodule(path)
        module.forward = functools.partial(module.forward, **given)
        return model

    return bring


BERT = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}


def hubert():
    """Make a convolution over the rows of a forward pass."""
    config = HubertConfig(hidden_size=32, num_conv_pos_embeddings=5, num_conv_pos_embedding_groups=4)
    return HubertPositionalConvEmbedding(config)


def normalized(norm: Callable[..., Any], training: bool) -> Bring:
    """Make a model with torch's spectral norm, which every forward pass in training mode refines."""

    def bring():
        model = llama().train(training)
        torch.manual_seed(3)
        norm(model.model.layers[0].mlp.up_proj)
        return model

    return bring


def observed():
    """Make a model whose activations are rounded by their observed range."""
    model = llama().train()
    mlp = model.model.layers[0].mlp
    mlp.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(mlp, inplace=True)
    return model


def with_experts(capacity: int) -> Bring:
    def bring():
        model = llama()
        torch.manual_seed(3)
        model.model.layers[0].mlp = Experts(capacity)
        return model

    return bring


METHODS: dict[str, tuple[Bring, str | None]] = {
    "an embedding without a weight": (with_new_tokens, None),
    "a softcapped output layer": (with_head(Softcapped()), None),
    "an output layer of one row": (with_head(LastRow(), before=True), "returns the logits of 1"),
    "other tokens": (lambda: llama(Shifted), "Shifted"),
    "other tokens after equal ones": (lambda: llama(NotTwice), "NotTwice"),
    "another argument": (lambda: llama(Scaling), "Scaling"),
    "the same inputs": (lambda: llama(Preparing), None),
    "a count among the arguments": (lambda: llama(Counting), "carries count"),
    "another loop": (lambda: llama(Sampling), "_sample"),
    "a criterion": (lambda: llama(Stopping), "may share state with Stopping"),
    "any arguments": (lambda: llama(Passing), None),
    "a count": (lambda: llama(Logging), "Logging.forward stores calls"),
    "the last logits": (lambda: llama(LastLogits), "returns the logits of 1"),
    "all logits": (lambda: llama(AllLogits), None),
    "one token": (lambda: llama(OneToken), "OneToken"),
    "a module's forward": (with_forward("model.layers.0.mlp", lambda o: o * 1.5), None),
    "a module's forward, last row": (
        with_forward("model.layers.0.mlp", lambda o: torch.cat([o[:, :-1], o[:, -1:] + VECTOR], 1)),
        "set as forward of model.layers.0.mlp",
    ),
    "a module's forward, last row, with a module that is not called": (
        with_forward(
            "model.layers.0.mlp", lambda o: torch.cat([o[:, :-1], o[:, -1:] + VECTOR], 1), idle=torch.nn.ReLU()
        ),
        "set as forward of model.layers.0.mlp",
    ),
    "experts of a small capacity": (with_experts(4), "Experts: logits differ"),
    "experts of some capacity": (with_experts(16), "Experts: logits differ"),
    "experts of a capacity above the size of usual drafts": (with_experts(40), "passes of 42"),
    "experts that take all rows": (with_experts(10_000), None),
    "a layer's forward, by rows": (
        with_forward("model.layers.1", lambda o: o + o.shape[1] * VECTOR),
        "of model.layers.1",
    ),
}


@singly_and_in_batches(METHODS)
def test_overridden_methods_match_generate(bring, reason, ids):
    compare(bring, reason, ids)


OF_TORCH: dict[str, tuple[Bring, str | None]] = {
    "over rows": (with_mlp(lambda: torch.nn.Softmax(1)), "Softmax: logits differ"),
    "over features": (with_mlp(lambda: torch.nn.Softmax(-1)), None),
    "each row": (with_mlp(lambda: torch.nn.LayerNorm(32), torch.nn.ReLU, torch.nn.Dropout), None),
    "reshaping": (with_mlp(*over_rows(torch.nn.Identity)), None),
    "a convolution over rows": (with_mlp(*over_rows(lambda: torch.nn.Conv2d(1, 1, 3, padding=1))), "Conv2d"),
    "an average over rows": (with_mlp(*over_rows(lambda: torch.nn.AvgPool2d((3, 1), 1, (1, 0)))), "AvgPool2d"),
    "an average over features": (with_mlp(lambda: torch.nn.AvgPool1d(3, 1, 1)), None),
    "a norm of all rows": (with_mlp(*over_rows(lambda: torch.nn.GroupNorm(1, 1))), "GroupNorm"),
    "fixed statistics": (with_mlp(*over_rows(lambda: torch.nn.BatchNorm2d(1))), None),
    "statistics": (with_mlp(*over_rows(lambda: torch.nn.BatchNorm2d(1)), training=True), "training mode"),
    "random slopes": (with_mlp(torch.nn.RReLU, training=True), "a RReLU"),
    "attention": (
        with_mlp(lambda: torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)),
        "TransformerEncoderLayer: logits differ",
    ),
    "an activation over rows": (with_activation(lambda: torch.nn.Softmax(1)), "Softmax: logits differ"),
    "an activation": (with_activation(torch.nn.Tanh), None),
    "observers": (observed, "FakeQuantize"),
    "a function over rows": (
        with_function("model.layers.0.mlp", "forward", functools.partial(torch.nn.functional.normalize, dim=1)),
        "normalize",
    ),
    "a function over rows, as an activation": (
        with_function("model.layers.0.mlp", "act_fn", functools.partial(torch.softmax, dim=1)),
        "set as act_fn of model.layers.0.mlp",
    ),
    "a function over rows, as a method": (
        with_function("model.layers.0.mlp.act_fn", "forward", torch.nn.Softmax(1).forward),
        "set as forward of model.layers.0.mlp.act_fn",
    ),
    "a function over rows, by name": (
        with_function("model.layers.0.mlp.act_fn", "forward", operator.methodcaller("cumsum", 1)),
        "set as forward of model.layers.0.mlp.act_fn",
    ),
    "a function over features": (
        with_function("model.layers.0.mlp", "act_fn", functools.partial(torch.softmax, dim=-1)),
        None,
    ),
    "a method with a fixed argument": (with_partial("model", output_hidden_states=False), None),
    "the last logits, by an argument": (with_partial("", logits_to_keep=1), "returns the logits of 1"),
    "no cache, by an argument": (with_partial("model", use_cache=False), None),
    "a module of another family over rows": (with_mlp(hubert), "HubertPositionalConvEmbedding"),
    "a module of another family": (with_mlp(lambda: BertIntermediate(BertConfig(**BERT))), None),
    "a spectral norm": (normalized(parametrizations.spectral_norm, True), "spectral norm of model.layers.0.mlp"),
    "a spectral norm by a hook": (normalized(torch.nn.utils.spectral_norm, True), "spectral norm of model.layers"),
    "a spectral norm, fixed": (normalized(parametrizations.spectral_norm, False), None),
}


@singly_and_in_batches(OF_TORCH)
def test_torch_modules_match_generate(bring, reason, ids):
    compare(bring, reason, ids)


class Pooling(torch.nn.Module):
    """A module that adds the mean of all rows, scaled by its weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(rows, 32))

    def forward(self, states):
        return states + self.gate.mean(0) * states.mean(1, keepdim=True)


def with_pooling(layer):
    layer.mlp = torch.nn.Sequential(layer.mlp, Pooling(1))


def with_large_pooling(layer):
    layer.mlp = torch.nn.Sequential(layer.mlp, Pooling(200))


def with_slight_pooling(layer):
    layer.mlp = torch.nn.Sequential(layer.mlp, Pooling(1))
    layer.mlp[1].gate.data = torch.linspace(1e-9, 1e-8, 32)[None]


def with_a_large_tensor(layer):
    gate = torch.zeros(200, 32)
    layer.register_forward_hook(lambda module, i, output: output + gate.mean(0) * output.mean(1, keepdim=True))
    layer.gates = [gate]


def with_a_gate(layer):
    layer.register_parameter("gate", torch.nn.Parameter(torch.zeros(32)))
    layer.register_forward_hook(lambda module, i, output: output + module.gate * output.mean(1, keepdim=True))


def with_a_branch(layer):
    layer.register_forward_hook(lambda module, i, o: o + o.mean(1, keepdim=True) if module.training else o)


def opened(model):
    with torch.no_grad():
        gate_of(model).copy_(VECTOR)


def opened_by_data(model):
    gate_of(model).data.copy_(VECTOR)


def opened_by_numpy(model):
    gate_of(model).detach().numpy()[:] = VECTOR.numpy()


def gate_of(model):
    gates = [weight for name, weight in model.named_parameters() if name.endswith("gate")]
    (gate,) = gates or model.model.layers[0].gates
    return gate


@pytest.mark.parametrize(
    ("bring", "change"),
    [
        *itertools.product([with_pooling, with_slight_pooling, with_a_gate], [opened]),
        *paired([with_large_pooling, with_a_large_tensor], [opened, opened_by_data, opened_by_numpy]),
        (with_a_branch, LlamaForCausalLM.train),
    ],
)
def test_effect_of_code_that_is_hidden_at_first(bring, change):
    """A zero weight that is trained later, or evaluation mode, hides the effect."""

    def brought():
        model = llama()
        bring(model.model.layers[0])
        return model

    both = SideBySide(brought)
    both.assert_same(greedy, times=2)
    both.change(change)
    both.assert_same(greedy, "", times=2)


def test_torch_modules_that_change_between_calls():
    """Their attributes and weights determine whether they mix rows."""

    def put(rows, dim):
        def change(model):
            mlp = model.model.layers[0].mlp
            mlp[2].weight.data.zero_()[:, :, rows] = 1.0
            mlp[4].dim = dim

        return change

    row, all_rows = slice(1, 2), slice(0, 3)
    both = SideBySide(with_mlp(*over_rows(lambda: torch.nn.Conv2d(1, 1, 3, padding=1)), lambda: torch.nn.Softmax(-1)))
    for rows, dim, reason in ((row, -1, None), (all_rows, -1, "Conv2d"), (row, 1, "differ"), (row, -1, None)):
        both.change(put(rows, dim))
        both.assert_same(greedy, reason)


@pytest.mark.parametrize("kind", [Processing, Stopping])
def test_processors_and_criteria_of_a_subclass_are_used(kind):
    wanted = greedy(llama(kind))
    assert not torch.equal(wanted, greedy(llama()))
    assert torch.equal(greedy(tr.accelerate(llama(kind))), wanted)


@pytest.mark.parametrize("changed", ["last row", "all"])
def test_method_replaced_in_a_class_of_the_family(monkeypatch, changed):
    both = SideBySide(llama)
    plain, kind = both.assert_same(greedy), type(both.plain.model.layers[0].mlp)
    change = (lambda o: o * 1.5) if changed == "all" else (lambda o: last(None, None, o))
    monkeypatch.setattr(kind, "forward", wrapped(kind.forward, change))
    assert not torch.equal(both.assert_same(greedy, None if changed == "all" else "LlamaMLP"), plain)


class Bound:
    """A descriptor that binds a function, like wrapt's for traced methods."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: Any, owner: type) -> Any:
        return self if module is None else types.MethodType(self.function, module)


def held(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, seemingly of Python's standard library, that holds another function only in its closure."""
    namespace: dict[str, Any] = {"__name__": "functools"}
    exec("def holding(function):\n    return lambda *inputs: function(*inputs)", namespace)
    return namespace["holding"](function)


WRAPPERS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "a descriptor": Bound,
    "a partial method": functools.partialmethod,
    "a property": lambda function: property(lambda module: functools.partial(function, module)),
    "a static method": lambda function: staticmethod(lambda *inputs: function(None, *inputs)),
    "a cache": functools.lru_cache(maxsize=0),
    "a generic function": functools.singledispatch,
    "a context manager": lambda function: unchanged()(function),
    "a function of a library": held,
}
"""Objects that can replace a method without being functions, or as functions of Python's standard library."""


@pytest.mark.parametrize("wrapper", thinned(WRAPPERS, 2))
def test_method_replaced_by_a_wrapper_falls_back(monkeypatch, wrapper):
    both = SideBySide(llama)
    plain, norm = both.assert_same(greedy), both.plain.model.norm
    own = norm.forward if wrapper == "a static method" else type(norm).forward

    def changed(module, states):
        return last(None, None, own(states) if module is None else own(module, states))

    for _ in range(2):  # then by another wrapper of the same kind
        monkeypatch.setattr(type(norm), "forward", WRAPPERS[wrapper](changed))
        assert not torch.equal(both.assert_same(greedy, "forward of LlamaRMSNorm"), plain)


def noted_trials(monkeypatch) -> list[Any]:
    """Return a list of all code that is tried from now on."""
    tried: list[Any] = []
    monkeypatch.setattr(trial, "try_out", lambda *given, make=trial.try_out: tried.append(given[1]) or make(*given))
    return tried


KEPT: dict[str, Bring] = {
    "no foreign code": llama,
    "a hook": hooked(lambda: everywhere),
    "a hook that is refused": hooked(lambda: last),
    "a hook with state": hooked(lambda: Counter().first),
    "a counting method": lambda: llama(Logging),
    "a method": lambda: llama(Preparing),
}


@pytest.mark.parametrize(("name", "bring"), KEPT.items(), ids=KEPT)
def test_code_is_tried_once(monkeypatch, name, bring):
    tried = noted_trials(monkeypatch)
    model = tr.accelerate(bring())
    for _ in range(3):
        model.generate(IDS, **GREEDY)
    tr.generate(model, IDS, **GREEDY)
    assert len(tried) == (name in ("a hook", "a hook that is refused", "a method"))


def test_hook_registered_for_each_call_is_tried_once(monkeypatch):
    """Steering libraries register their hooks again for every sequence."""
    tried = noted_trials(monkeypatch)
    model = tr.accelerate(llama())
    for _ in range(3):
        handle = model.model.layers[0].register_forward_hook(functools.partial(everywhere))
        model.generate(IDS, **GREEDY)
        handle.remove()
        model.generate(IDS, **GREEDY)
        assert model.acceleration.fallback is None
    assert len(tried) == 1


def attending_by(attention: Callable[..., Any], name: str = "of the test", masks: Any = sdpa_mask) -> Bring:
    def bring(**config):
        AttentionInterface.register(name, attention)
        if masks is not None:
            AttentionMaskInterface.register(name, masks)
        model = llama(**config)
        model.set_attn_implementation(name)
        return model

    return bring


def attending(scale: Callable[[torch.Tensor, torch.Tensor], Any], **config: Any) -> Bring:
    def attention(module, query, key, value, mask, **options):
        return sdpa_attention_forward(module, query * scale(query, key), key, value, mask, **options)

    return functools.partial(attending_by(attention), **config)


ATTENTION: dict[str, tuple[Bring, str | None]] = {
    "as it is": (attending(lambda query, key: 1.0), None),
    "scaled": (attending(lambda query, key: 2.5), "attending.<locals>.attention"),
    "by rows": (attending(lambda query, key: query.shape[2]), "attending.<locals>.attention"),
    "beyond some keys": (attending(lambda query, key: 1 + (key.shape[2] > 40)), "after a prompt of 128 tokens"),
    "one row beyond some keys": (
        attending(lambda query, key: 1 + (query.shape[2] == 1) * (key.shape[2] / 30 > 1.5)),
        "after a prompt of 128 tokens",
    ),
    "beyond many keys": (attending(lambda query, key: 1 + (key.shape[2] > 200)), "after a prompt of 400 tokens"),
    "beyond the keys of every trial": (
        attending(lambda query, key: 1 + (key.shape[2] > 700), max_position_embeddings=1024),
        "it names 700",
    ),
    "beyond the context": (attending(lambda query, key: 1 + (key.shape[2] > 2000), max_position_embeddings=1024), None),
    "of transformers": (attending_by(sdpa_attention_forward), None),
    "of transformers, with a setting": (
        attending_by(functools.partial(sdpa_attention_forward, is_causal=False)),
        "sdpa_attention_forward",
    ),
    "of the family": (attending_by(modeling_llama.eager_attention_forward), "eager_attention_forward"),
}


@singly_and_in_batches(ATTENTION)
def test_custom_attention_matches_generate(bring, reason, ids):
    """Accelerated calls attend with sdpa in place of implementations that accept no tree mask. From the second token on
    there are more than 40 keys.
    """
    longer = torch.cat([tiny.prompt(3, 30).expand(len(ids), -1), ids], dim=1)
    compare(bring, reason, longer, max_new_tokens=20)


@pytest.mark.parametrize(("masks", "reason"), [(sdpa_mask, None), (None, "after padding")])
def test_attention_without_a_mask_function_sees_padding(masks, reason):
    both = SideBySide(attending_by(sdpa_attention_forward, f"masked by {masks}", masks))
    both.assert_same(greedy)
    both.assert_same(lambda model: model.generate(**batch([9, 4], 1), **GREEDY), reason, times=2)
    both.assert_same(greedy)


def test_trial_leaves_no_trace_in_a_tensor_that_code_writes_to():
    """A hook counts positions: as many as in `generate`, although trials have run it too."""

    def counted(change):
        model, positions = change(llama()), torch.zeros(1)

        def count(module, inputs, output):
            positions.add_(output.shape[1])

        model.model.norm.register_forward_hook(count)
        model.generate(IDS, **GREEDY)
        return model, int(positions)

    (_, wanted), (model, found) = counted(lambda model: model), counted(tr.accelerate)
    assert "writes to a tensor" in str(model.acceleration.fallback)
    assert found == wanted == IDS.shape[1] + GREEDY["max_new_tokens"] - 1


# Modes and configurations


def test_training_mode_with_dropout_falls_back():
    both = SideBySide(lambda: llama(attention_dropout=0.3))
    plain = both.assert_same(greedy)
    for training in (True, False, True):
        both.change(lambda model: model.train(training))  # noqa: B023
        wanted, _ = both.assert_same(seeded, "training mode" if training else None)
        assert torch.equal(wanted, plain) != training


def seeded(model: Any) -> tuple[Any, torch.Tensor]:
    return tiny.seeded(model.generate, IDS, **GREEDY)


def test_training_mode_without_dropout_is_accelerated():
    """Until a dropout rate is set."""
    both = SideBySide(lambda: llama().train())
    for share, reason in ((0.0, None), (0.3, "training mode")):
        both.change(lambda model: setattr(model.model.layers[0].self_attn, "attention_dropout", share))  # noqa: B023
        both.assert_same(seeded, reason)


RANDOM = {
    "dbrx": "resid_pdrop",
    "doge": "hidden_dropout",
    "gptj": "attn_pdrop",
    "mixtral": "router_jitter_noise",
    "biogpt": "layerdrop",
}


@pytest.mark.parametrize(("family", "number"), RANDOM.items())
def test_random_layers_in_training_mode_fall_back(family, number):
    case = next(case for case in (*SUPPORTED, *FURTHER) if case.family == family)
    case = dataclasses.replace(case, config={**case.config, number: 0.5})
    SideBySide(lambda: model_of(case).train()).assert_same(seeded, "training mode")


@pytest.mark.parametrize("family", ["gpt2", "persimmon"])
def test_attention_in_training_mode_reads_shares_of_dropouts_in_evaluation_mode(family):
    """As after `model.train()` and `eval()` of every dropout."""
    case = next(case for case in SUPPORTED if case.family == family)
    name = "attn_pdrop" if family == "gpt2" else "attention_dropout"
    both = SideBySide(lambda: model_of(dataclasses.replace(case, config={**case.config, name: 0.5})).train())
    both.change(lambda model: [part.eval() for part in model.modules() if "Dropout" in type(part).__name__])
    both.assert_same(seeded, "training mode")


def test_noisy_embeddings_in_training_mode_fall_back():
    both = SideBySide(lambda: llama().train())
    both.change(lambda model: activate_neftune(model, 50.0))
    both.assert_same(seeded, "neftune_noise_alpha")


def mixture(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**MIXTURE, **more, output_router_logits=True)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


MIXTURE = tiny.sizes(
    "vocab_size=64 hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 "
    "num_key_value_heads=2 eos_token_id=None num_experts_per_tok=2 initializer_range=0.3"
)
EXPERTS = tiny.sizes("num_experts=4 moe_intermediate_size=16")
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {**EXPERTS, "head_dim": 8},
    "GptOss": {"num_local_experts": 4, "head_dim": 8},
    "Phimoe": {"num_local_experts": 4},
}


@pytest.mark.parametrize("ids", thinned([IDS, BATCH], 2))
@pytest.mark.parametrize(("family", "more"), MIXTURES.items(), ids=MIXTURES)
def test_router_loss_is_not_computed(family, more, ids):
    compare(lambda: mixture(family, **more), None, ids)


# Adapters


def adapted(config: Any, *names: str) -> Any:
    torch.manual_seed(3)
    first, *others = names or ("default",)
    wrapper = peft.get_peft_model(llama(), config, adapter_name=first)
    for name in others:
        wrapper.add_adapter(name, config)
    return wrapper.eval()


def lora(**options: Any) -> peft.LoraConfig:
    targets = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**targets, **options})


ADAPTERS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "lora": (lora, None),
    "dora": (lambda: lora(use_dora=True), None),
    "rank-stabilized": (lambda: lora(use_rslora=True, r=4), None),
    "ia3": (
        lambda: peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=["k_proj", "down_proj"],
            feedforward_modules=["down_proj"],
            init_ia3_weights=False,
        ),
        None,
    ),
    "vera": (lambda: peft.VeraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], d_initial=0.5), None),
    "prompt tuning": (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "prompt"),
    "prefix tuning": (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "pre"),
    "alora": (lambda: lora(alora_invocation_tokens=[7]), "alora"),
}


@singly_and_in_batches(ADAPTERS)
def test_adapters_match_generate(bring, reason, ids):
    compare(lambda: adapted(bring()), reason, ids)


def test_adapter_with_complex_and_empty_tensors():
    def bring():
        wrapper = adapted(lora())
        layer = wrapper.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        layer.register_buffer("table", torch.tensor([3 + 4j, 1j]))
        layer.register_buffer("nothing", torch.empty(0))
        return wrapper

    compare(bring, None)


@pytest.mark.parametrize("ids", thinned([BATCH, IDS], 2))
def test_adapter_for_each_row(ids):
    names = ["a", "b"][: len(ids)]
    ends = list(range(0, 60, 3))
    compare(lambda: adapted(lora(), "a", "b"), None, ids, adapter_names=names, eos_token_id=ends)
    compare(lambda: adapted(lora(), "a", "b"), None, ids, adapter_names=["__base__", "b"][: len(ids)])


def test_adapters_switched_between_calls():
    both, texts = SideBySide(lambda: adapted(lora(), "a", "b")), []
    for name in ("a", "b", None, "a"):
        if name is None:
            with both.plain.disable_adapter(), both.accelerated.disable_adapter():
                texts.append(both.assert_same(greedy))
        else:
            both.change(lambda wrapper: wrapper.set_adapter(name))  # noqa: B023
            texts.append(both.assert_same(greedy))
    assert len({tuple(text.flatten().tolist()) for text in texts}) == 3


FLIPS: dict[str, Callable[[Any], Any]] = {
    "scaling of one adapter": lambda layer: layer.scaling.update(a=-2.0),
    "disabled": lambda layer: layer.enable_adapters(False),
    "two adapters": lambda layer: layer.set_adapter(["a", "b"]),
    "merged": lambda layer: layer.merge(),
    "negated weights": lambda layer: layer.lora_A["a"].weight.data.neg_(),
    "dropout": lambda layer: layer.lora_dropout.update({"a": torch.nn.Dropout(0.5).eval()}),
}


@pytest.mark.parametrize("flip", thinned(FLIPS, 2))
def test_adapter_attributes_changed_between_calls(flip):
    """First of one layer, then of all others."""
    both = SideBySide(lambda: adapted(lora(), "a", "b"))
    before = both.assert_same(greedy)
    for some in (slice(1), slice(1, None)):
        for wrapper in (both.plain, both.accelerated):
            for layer in [layer for layer in wrapper.modules() if isinstance(layer, LoraLayer)][some]:
                FLIPS[flip](layer)
        after = both.assert_same(greedy)
    assert not torch.equal(before, after) or flip in ("merged", "dropout")


# Trainers and the vocabulary


TRAINER = """
def fused(replaced):
    def forward(self, *args, loss=False, **kwargs):
        with contextlib.nullcontext():
            return replaced(*args, **kwargs)
    return forward
"""


def with_forward_of_trl(model: Any) -> None:
    """Set a forward that calls the previous one, as `trl.trainer.utils` does. Analysis alone would not accept it."""
    namespace: dict[str, Any] = {"__name__": "trl.trainer.utils", "contextlib": contextlib}
    exec(TRAINER, namespace)
    model.forward = types.MethodType(namespace["fused"](model.forward), model)


def test_forward_set_by_a_trainer_is_tried_once(monkeypatch):
    """It is tried once while weights are trained, and again after it is set again."""
    tried, both = noted_trials(monkeypatch), SideBySide(llama)
    for times in (1, 2):
        both.change(with_forward_of_trl)
        for _ in range(2):
            both.assert_same(greedy)
            with torch.no_grad():
                both.change(lambda model: model.lm_head.weight.mul_(-7.0))
        assert len(tried) == times


def test_forward_set_by_a_trainer_around_user_code_falls_back():
    both = SideBySide(llama)

    def bring(model: Any) -> None:
        original, calls = model.forward, []
        model.forward = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
        with_forward_of_trl(model)

    both.change(bring)
    both.assert_same(greedy, "set as forward of LlamaForCausalLM")


@pytest.mark.parametrize("drafter", ["recycling", "published", "suffix"])
def test_resized_embeddings(drafter, caplog):
    both = SideBySide(llama, drafter)
    both.assert_same(greedy)
    for size in (70, 60):
        both.change(lambda model: tiny.seeded(model.resize_token_embeddings, size, mean_resizing=False))  # noqa: B023
        both.assert_same(lambda model: model.generate(IDS.clamp(max=size - 1), **GREEDY), times=2)  # noqa: B023
    said = [record.getMessage() for record in caplog.records if "starting again" in record.getMessage()]
    assert len(said) == (0 if drafter == "suffix" else 2)
