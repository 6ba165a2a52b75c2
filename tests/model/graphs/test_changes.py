"""Replayed passes follow a model that changes between calls, or are refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny
from support.adapters import adapted
from support.cases import thinned
from support.runs import decoded, plain
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama import modeling_llama

import token_recycling as tr
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.target import Target

Change = Callable[[Any], Any]
IDS = tiny.prompt(0, 6)
pytestmark = pytest.mark.usefixtures("recorded")


def fast_output(model):
    text, stats = decoded(model, IDS, "prompt_lookup", max_new_tokens=20)
    assert stats.path.startswith("fast")
    return text


class Reversed(torch.nn.Module):
    """A parametrization that reverses the rows of a weight."""

    def forward(self, weight):
        return weight.flip(0)


CHANGES: dict[str, Change] = {
    "switched": lambda model: setattr(model.lm_head, "active", ["b"]),
    "disabled": lambda model: setattr(model.lm_head, "disabled", True),
    "patched": lambda model: setattr(model.model.norm, "forward", lambda states: states.flip(-1)),
    "swapped": lambda model: setattr(
        model.lm_head.base, "weight", torch.nn.Parameter(model.lm_head.base.weight.detach().flip(0))
    ),
    "parametrized": lambda model: parametrize.register_parametrization(model.lm_head.base, "weight", Reversed()).eval(),
    "other numbers": lambda model: model.lm_head.base.load_state_dict(
        {"weight": model.lm_head.base.weight.detach().flip(0)}
    ),
}


@pytest.mark.parametrize("name", thinned(CHANGES, 2))
def test_changed_model_equals_generate(model, name):
    change = CHANGES[name]
    adapted(model)
    before = plain(model, IDS)
    assert fast_output(model) == before
    change(model)
    wanted = plain(model, IDS)
    assert wanted != before
    assert [fast_output(model) for _ in range(2)] == [wanted, wanted]


REPLACED: dict[str, tuple[Any, str, Change]] = {
    "in the family": (
        modeling_llama,
        "apply_rotary_pos_emb",
        lambda own: lambda q, k, cos, sin: own(q, -2 * k, cos, sin),
    ),
    "in a class": (modeling_llama.LlamaMLP, "forward", lambda own: lambda self, states: -9 * own(self, states)),
    "in torch": (torch.nn.functional, "silu", lambda own: lambda states, inplace=False: -9 * own(states)),
}


@pytest.mark.parametrize(("holder", "name", "make"), REPLACED.values(), ids=REPLACED)
def test_function_replaced_between_calls_equals_generate(model, holder, name, make, monkeypatch):
    before = plain(model, IDS)
    assert fast_output(model) == before
    monkeypatch.setattr(holder, name, make(getattr(holder, name)))
    assert before != plain(model, IDS) == fast_output(model)


def test_variable_of_a_function_changed_between_calls_equals_generate(model):
    share, own = 0.0, model.model.norm.forward
    model.model.norm.forward = lambda states: own(states) + share * own(states).flip(-1)
    before = plain(model, IDS)
    assert fast_output(model) == before
    share = 1.0
    assert before != plain(model, IDS) == fast_output(model)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.load_state_dict(tiny.llama(seed=5).state_dict()),
    ],
    ids=["dtype", "attention", "loaded"],
)
def test_new_dtype_attention_or_weights_are_captured_again(model, change):
    before = passes_or_reason(Target(model))
    assert passes_or_reason(Target(model)) is before
    change(model)
    assert passes_or_reason(Target(model)) is not before
    assert fast_output(model) == plain(model, IDS)


REFUSED: dict[str, tuple[Change, str]] = {
    "hook": (
        lambda model: model.model.norm.register_forward_hook(lambda module, args, output: output.flip(-1)),
        "on LlamaRMSNorm",
    ),
    "hook before": (
        lambda model: model.model.norm.register_forward_pre_hook(lambda module, args: args[0].flip(-1)),
        "hook",
    ),
    "wrapped part": (
        lambda model: setattr(model.model, "norm", torch.compile(model.model.norm, backend="eager")),
        "is compiled",
    ),
    "compiled function": (
        lambda model: setattr(model.model.norm, "forward", torch.compile(model.model.norm.forward, backend="eager")),
        "LlamaRMSNorm is compiled",
    ),
    "training": (lambda model: model.train(), "training mode"),
}


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("name", ["compile()", "forward"])
def test_compiled_model_is_captured_uncompiled(model, name):
    wanted = plain(model, IDS)
    if name == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        model.compile(backend="eager")
    assert fast_output(model) == wanted
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_changes_that_replays_cannot_follow_are_refused(model, change, reason):
    assert fast_output(model) == plain(model, IDS)
    change(model)
    with pytest.raises(tr.NoFastPathError, match=reason):
        fast_output(model)
    assert decoded(model, IDS, "published", fast=False, max_new_tokens=20)[0] == plain(model, IDS)


@pytest.mark.parametrize(
    ("within", "reason"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), r"autocast to torch\.bfloat16"),
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
    ],
    ids=["autocast", "mode"],
)
def test_modes_that_replays_cannot_follow_are_refused(model, within, reason):
    fast_output(model)
    with within(), pytest.raises(tr.NoFastPathError, match=reason):
        fast_output(model)
    assert fast_output(model) == plain(model, IDS)
    with torch.device("cpu"):
        assert fast_output(model) == plain(model, IDS)


def test_output_recording_hooks_of_transformers_are_allowed(model):
    wanted = fast_output(model)
    model(IDS, output_hidden_states=True, output_attentions=False)
    assert any(module._forward_hooks for module in model.modules())
    assert fast_output(model) == wanted


def test_forward_that_sets_attributes_is_refused(model):
    norm, own = model.model.norm, model.model.norm.forward
    norm.calls = 0

    def counted(states):
        norm.calls += 1
        return own(states)

    norm.forward = counted
    with pytest.raises(tr.UnsupportedModelError, match="stores calls"):
        fast_output(model)
    assert norm.calls == 0


def test_model_changed_during_a_call_is_not_captured(model):
    """Earlier captures would be mixed with new ones and replayed in later calls."""
    head = adapted(model)
    wanted = fast_output(model)
    steps = tr.stream(model, IDS, "recycling:tree=40", fast=True, max_new_tokens=80)
    next(steps)
    head.active = ["b"]
    with pytest.raises(tr.NoFastPathError, match="changed during the call"):
        list(steps)
    head.active = ["a"]
    assert fast_output(model) == wanted


def test_hooks_are_refused_until_they_are_removed(model):
    wanted = fast_output(model)
    for register in (register_module_forward_hook, model.model.norm.register_forward_hook):
        hook = register(lambda module, args, output: None)
        with pytest.raises(tr.NoFastPathError, match="hook"):
            fast_output(model)
        hook.remove()
        assert fast_output(model) == wanted
