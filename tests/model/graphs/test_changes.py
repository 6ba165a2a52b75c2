"""Replayed passes follow a model that is changed between texts, or give way to eager ones with the reason."""

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

import token_recycling as tr
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.target import Target

Change = Callable[[Any], Any]
IDS = tiny.prompt(0, 6)
pytestmark = pytest.mark.usefixtures("recorded")


def fast(model):
    text, stats = decoded(model, IDS, "prompt_lookup", max_new_tokens=20)
    assert stats.path.startswith("fast")
    return text


class Reversed(torch.nn.Module):
    """A parametrisation."""

    def forward(self, weight):
        return weight.flip(0)


CHANGES: dict[str, Change] = {
    "switched": lambda model: setattr(model.lm_head, "active", ["b"]),
    "disabled": lambda model: setattr(model.lm_head, "disabled", True),
    "patched": lambda model: setattr(model.model.norm, "forward", lambda states: states.flip(-1)),
    "swapped": lambda model: setattr(
        model.lm_head.base, "weight", torch.nn.Parameter(model.lm_head.base.weight.detach().flip(0))
    ),
    "parametrised": lambda model: parametrize.register_parametrization(model.lm_head.base, "weight", Reversed()).eval(),
    "other numbers": lambda model: model.lm_head.base.load_state_dict(
        {"weight": model.lm_head.base.weight.detach().flip(0)}
    ),
}


@pytest.mark.parametrize("name", thinned(CHANGES, 2))
def test_a_changed_model_says_what_it_says_without_replays(model, name):
    change = CHANGES[name]
    adapted(model)
    before = plain(model, IDS)
    assert fast(model) == before
    change(model)
    wanted = plain(model, IDS)
    assert wanted != before
    assert [fast(model) for _ in range(2)] == [wanted, wanted]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.load_state_dict(tiny.llama(seed=5).state_dict()),
    ],
    ids=["dtype", "attention", "loaded"],
)
def test_other_arithmetic_and_other_weights_are_captured_anew(model, change):
    before = passes_or_reason(Target(model))
    assert passes_or_reason(Target(model)) is before
    change(model)
    assert passes_or_reason(Target(model)) is not before
    assert fast(model) == plain(model, IDS)


def changed(output):
    return output.flip(-1)


REFUSED: dict[str, tuple[Change, str]] = {
    "hook": (
        lambda model: model.model.norm.register_forward_hook(lambda module, args, output: changed(output)),
        "on LlamaRMSNorm",
    ),
    "hook before": (
        lambda model: model.model.norm.register_forward_pre_hook(lambda module, args: changed(args[0])),
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
def test_a_model_compiled_as_a_whole_is_captured_uncompiled(model, name):
    wanted = plain(model, IDS)
    if name == "forward":
        model.forward = torch.compile(model.forward, backend="eager")
    else:
        model.compile(backend="eager")
    assert fast(model) == wanted
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_replays_cannot_follow_is_refused(model, change, reason):
    assert fast(model) == plain(model, IDS)
    change(model)
    with pytest.raises(tr.NoFastPathError, match=reason):
        fast(model)
    assert decoded(model, IDS, "published", fast=False, max_new_tokens=20)[0] == plain(model, IDS)


@pytest.mark.parametrize(
    ("within", "reason"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), r"autocast to torch\.bfloat16"),
        (lambda: FlopCounterMode(display=False), "FlopCounterMode"),
    ],
    ids=["autocast", "mode"],
)
def test_surroundings_that_replays_cannot_follow_are_refused(model, within, reason):
    fast(model)
    with within(), pytest.raises(tr.NoFastPathError, match=reason):
        fast(model)
    assert fast(model) == plain(model, IDS)
    with torch.device("cpu"):
        assert fast(model) == plain(model, IDS)


def test_hooks_of_transformers_that_note_down_outputs_do_no_harm(model):
    wanted = fast(model)
    model(IDS, output_hidden_states=True, output_attentions=False)
    assert any(module._forward_hooks for module in model.modules())
    assert fast(model) == wanted


def test_a_pass_that_sets_attributes_is_refused(model):
    norm, own = model.model.norm, model.model.norm.forward
    norm.calls = 0

    def counted(states):
        norm.calls += 1
        return own(states)

    norm.forward = counted
    with pytest.raises(tr.UnsupportedModelError, match="stores calls"):
        fast(model)
    assert norm.calls == 0


def test_a_model_changed_within_a_text_is_not_captured(model):
    """What was captured before would be mixed with it, and replayed in later texts."""
    head = adapted(model)
    wanted = fast(model)
    steps = tr.stream(model, IDS, "recycling:tree=40", fast=True, max_new_tokens=80)
    next(steps)
    head.active = ["b"]
    with pytest.raises(tr.NoFastPathError, match="changed during the call"):
        list(steps)
    head.active = ["a"]
    assert fast(model) == wanted


def test_hooks_on_all_modules_and_hooks_that_were_taken_off(model):
    wanted = fast(model)
    for register in (register_module_forward_hook, model.model.norm.register_forward_hook):
        hook = register(lambda module, args, output: None)
        with pytest.raises(tr.NoFastPathError, match="hook"):
            fast(model)
        hook.remove()
        assert fast(model) == wanted
