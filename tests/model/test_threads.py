"""Several threads share one model: every forward pass uses the right attention, and the model never visibly changes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import tiny
from support.architectures import BORDERS, chosen, model_of, named
from support.recurrent_architectures import recurrent
from support.releases import needs
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

import token_recycling as tr
from token_recycling.model.facts import facts_of
from token_recycling.model.hidden import layer_states
from token_recycling.model.prefill import prefill
from token_recycling.model.target import Target
from token_recycling.trees.draft import Draft

TREE = tr.Template.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
TEXT = tiny.prompt(0, 13)
KINDS = {
    "sdpa": lambda: tiny.llama(),
    "ALiBi": lambda: model_of(named("bloom")),
    "windows": lambda: model_of(named("gemma3_text")),
    "states": lambda: model_of(recurrent("bamba")),
}


@pytest.fixture(params=[pytest.param(kind, marks=[needs(5, 14)] * (kind == "states")) for kind in KINDS])
def shared(request):
    """One model for all threads."""
    return KINDS[request.param]().eval()


@torch.no_grad()
def tree_pass(model, before=lambda: None):
    """Return the logits (nodes, vocabulary) of a tree; `before` is called between the passes over prompt and tree."""
    target = Target(model)
    cache = target.new_cache()
    prefill(target, [TEXT[0]], cache)
    length = TEXT.shape[1] - 1
    drafts = [Draft(torch.cat([TEXT[0, -1:], torch.arange(5)]), TREE.parents)]
    before()
    return target.forward(target.inputs.of(drafts, [length], length), cache)[0]


@torch.no_grad()
def plain(model):
    return model(input_ids=TEXT).logits[0]


class Gate:
    """Hold the next forward pass of a thread in the first layer until the gate is opened."""

    def __init__(self, model):
        self.inside, self._open, self._thread = threading.Event(), threading.Event(), 0
        layers = next(child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList))
        layers[0].register_forward_pre_hook(self._wait)

    def _wait(self, *given):
        if threading.get_ident() == self._thread:
            self.inside.set()
            assert self._open.wait(20)

    def hold(self):
        self._thread = threading.get_ident()

    def open(self):
        self._open.set()


def test_plain_forward_is_unaffected_by_a_tree_pass_of_another_thread(shared):
    own, wanted, wanted_of_tree = shared.config._attn_implementation, plain(shared), tree_pass(shared)
    gate = Gate(shared)
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(tree_pass, shared, gate.hold)
        assert gate.inside.wait(20)
        assert shared.config._attn_implementation == own
        assert torch.equal(plain(shared), wanted)
        assert torch.equal(tree_pass(shared), wanted_of_tree)
        gate.open()
        assert torch.equal(paused.result(20), wanted_of_tree)
    assert shared.config._attn_implementation == own
    assert torch.equal(plain(shared), wanted)


# Implementations registered by others


@torch.no_grad()
@pytest.mark.parametrize("numbers", [(2,), (0, 1)])
def test_hidden_states_of_other_threads_are_not_recorded(numbers):
    model = tiny.llama()
    with layer_states(model, numbers) as states, ThreadPoolExecutor(1) as others:
        others.submit(model, TEXT).result()
        assert not states
        model(TEXT[:, :4])
        others.submit(model, TEXT).result()
    assert [read.shape[1] for read in states] == [4]


@pytest.fixture
def registered():
    """Register attention functions for one test."""
    functions, masks = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    yield AttentionInterface.register
    AttentionInterface._global_mapping.clear()
    AttentionInterface._global_mapping.update(functions)
    AttentionMaskInterface._global_mapping.clear()
    AttentionMaskInterface._global_mapping.update(masks)


class Recorded:
    """An attention function that records its masks and calls another implementation."""

    def __init__(self, name="sdpa"):
        self.masks: list[Any] = []
        self._function = AttentionInterface()[name]

    def __call__(self, module, query, key, value, attention_mask, **others):
        self.masks.append(attention_mask)
        return self._function(module, query, key, value, attention_mask, **others)


def test_custom_attention_is_called_unchanged_outside_of_tree_passes(registered):
    own, model = Recorded(), tiny.llama()
    registered("own", own)
    wanted, wanted_of_tree = plain(model), tree_pass(model)
    model.config._attn_implementation = "own"
    for _ in range(2):
        assert torch.equal(plain(model), wanted)
        assert own.masks == [None] * len(model.model.layers)
        own.masks.clear()
        torch.testing.assert_close(tree_pass(model), wanted_of_tree)
        assert own.masks == [], "it is not known to support tree masks"


@pytest.mark.parametrize(
    ("table", "function"),
    [(AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, flash_attention_mask)],
)
def test_target_is_outdated_once_an_attention_function_is_replaced(registered, table, function):
    """The replaced function may compute attention or create masks."""
    registered("own", sdpa_attention_forward)
    model = tiny.llama()
    model.config._attn_implementation = "own"
    target = Target(model)
    assert target.is_current()
    table.register("own", function)
    assert not target.is_current()
    assert Target(model).is_current()


def test_model_without_sdpa_uses_its_own_eager_attention(registered):
    model = model_of(named("gpt_oss"), "eager")
    wanted = tree_pass(model)
    registered("own", Recorded())
    model.config._attn_implementation = "own"
    torch.testing.assert_close(tree_pass(model), wanted)


# Facts and turns


def fact(model, key, make):
    return facts_of(model).get(key, make)


def test_concurrent_threads_compute_a_fact_once(model):
    begun, continue_copies, made = threading.Event(), threading.Event(), []

    def make():
        begun.set()
        assert continue_copies.wait(20)
        made.append(fact(model, "a part", lambda: 1))
        return len(made)

    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(fact, model, "whole", make) for _ in range(3)]
        assert begun.wait(20)
        assert pool.submit(fact, tiny.llama(), "whole", lambda: 7).result(20) == 7, "another model does not wait"
        continue_copies.set()
        assert [result.result(20) for result in results] == [1, 1, 1]


@pytest.mark.parametrize("case", chosen(BORDERS))
def test_runs_take_turns_where_passes_change_the_model(case):
    target = Target(model_of(case))
    entered, threshold = threading.Event(), target.info.length_threshold

    def enter():
        with Target(target.model).turns()():
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with target.turns()(), target.turns()():
            waiting = pool.submit(enter)
            assert entered.wait(0.1 if threshold.changes_model else 20) != threshold.changes_model
        waiting.result(20)
    assert entered.is_set()
