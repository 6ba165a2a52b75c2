"""Replayed steps follow a model that is changed between texts, or give way to the ordinary way with the reason."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import tiny
from support.adapters import adapted
from support.runs import decoded, plain
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

import token_recycling as tr
from token_recycling.cuda_graphs import runner_of
from token_recycling.cuda_graphs.support import runner_or_reason
from token_recycling.model.tree_model import TreeModel

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


def merged(model):
    """The addition becomes part of the weight, and its layer is taken out."""
    head = model.lm_head
    base, addition = head.base, head.additions["a"]
    base.weight.data = base.weight.data + 9 * addition.weight.data.flip(0)
    model.lm_head = base


CHANGES: dict[str, Change] = {
    "switched": lambda model: setattr(model.lm_head, "active", ["b"]),
    "added": lambda model: model.lm_head.active.append("b"),
    "disabled": lambda model: setattr(model.lm_head, "disabled", True),
    "scaled": lambda model: model.lm_head.scaling.update(a=-5.0),
    "masked": lambda model: setattr(model.lm_head, "mask", -5 * torch.ones(64)),
    "merged": merged,
    "patched": lambda model: setattr(model.model.norm, "forward", lambda states: states.flip(-1)),
    "swapped": lambda model: setattr(
        model.lm_head.base, "weight", torch.nn.Parameter(model.lm_head.base.weight.detach().flip(0))
    ),
    "parametrised": lambda model: parametrize.register_parametrization(model.lm_head.base, "weight", Reversed()).eval(),
    "other numbers": lambda model: model.lm_head.base.load_state_dict(
        {"weight": model.lm_head.base.weight.detach().flip(0)}
    ),
    "left out": lambda model: model.model.layers.pop(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_model_says_what_it_says_without_replays(model, change):
    adapted(model)
    before = plain(model, IDS)
    assert fast(model) == before
    change(model)
    assert plain(model, IDS) != before
    assert fast(model) == plain(model, IDS)
    assert fast(model) == plain(model, IDS)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: setattr(model.config, "experts_implementation", "eager"),
        lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
        lambda model: model.load_state_dict(tiny.llama(seed=5).state_dict()),
        lambda model: model.lm_head.weight.detach().mul_(2),
    ],
    ids=["dtype", "attention", "option", "moved", "loaded", "written to"],
)
def test_other_arithmetic_and_other_weights_are_captured_anew(model, change):
    before = runner_or_reason(TreeModel(model))
    assert runner_or_reason(TreeModel(model)) is before
    change(model)
    assert runner_or_reason(TreeModel(model)) is not before
    assert fast(model) == plain(model, IDS)


def changed(output):
    return output.flip(-1)


@pytest.fixture
def everywhere():
    """Puts a hook on all modules, and takes it off afterwards."""
    handles = []
    yield lambda model: handles.append(register_module_forward_hook(lambda module, args, output: None))
    for handle in handles:
        handle.remove()


REFUSED: dict[str, tuple[Change, str]] = {
    "hook": (
        lambda model: model.model.norm.register_forward_hook(lambda module, args, output: changed(output)),
        "<lambda> on LlamaRMSNorm",
    ),
    "hook before": (
        lambda model: model.model.norm.register_forward_pre_hook(lambda module, args: changed(args[0])),
        "hook",
    ),
    "compiled part": (lambda model: model.model.norm.compile(backend="eager"), "LlamaRMSNorm is compiled"),
    "wrapped part": (
        lambda model: setattr(model.model, "norm", torch.compile(model.model.norm, backend="eager")),
        "is compiled",
    ),
    "compiled function": (
        lambda model: setattr(model.model.norm, "forward", torch.compile(model.model.norm.forward, backend="eager")),
        "LlamaRMSNorm is compiled",
    ),
    "training": (lambda model: model.train(), "training mode"),
    "part in training": (lambda model: model.model.layers[1].train(), "LlamaDecoderLayer is in training"),
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


def test_a_hook_on_all_modules_is_refused(model, everywhere):
    fast(model)
    everywhere(model)
    with pytest.raises(tr.NoFastPathError, match=r"hook .* on all modules"):
        fast(model)


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


def test_a_hook_that_was_taken_off_leaves_nothing(model):
    wanted = fast(model)
    hook = model.model.norm.register_forward_hook(lambda module, args, output: changed(output))
    with pytest.raises(tr.NoFastPathError, match="hook"):
        fast(model)
    hook.remove()
    assert fast(model) == wanted


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
    for _ in range(2):
        with pytest.raises(tr.NoFastPathError, match="LlamaForCausalLM sets attributes"):
            fast(model)
        calls = norm.calls
    with pytest.raises(tr.NoFastPathError):
        fast(model)
    assert norm.calls - calls <= 1  # what was found out is not tried again


def test_what_a_first_pass_keeps_is_no_change(model):
    norm, own = model.model.norm, model.model.norm.forward

    def lazy(states):
        norm.factor = getattr(norm, "factor", 2.0)
        return own(states) * norm.factor

    norm.forward = lazy
    assert fast(model) == plain(model, IDS)


def test_graphs_of_a_state_that_is_gone_are_freed(model):
    """Before new ones are made; also those that a drafter had measured."""
    head, drafter = adapted(model), tr.make_drafter("recycling:tree=8")
    decoded(model, IDS, drafter, max_new_tokens=8)
    runner = runner_of(TreeModel(model))
    gone = weakref.ref(runner)
    del runner
    head.disabled = True
    fast(model)
    gc.collect()
    assert gone() is None


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
