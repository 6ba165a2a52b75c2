"""Several threads on one model: each of its passes attends as it should, and the model is as before at every time."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import tiny
from support.architectures import BORDERS, chosen, model_of, named
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

import token_recycling as tr
from token_recycling.model.facts import facts_of
from token_recycling.model.prefill import prefill
from token_recycling.model.target import Target
from token_recycling.trees.draft import Draft

TREE = tr.Template.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
TEXT = tiny.prompt(0, 13)
KINDS = {
    "sdpa": lambda: tiny.llama(),
    "ALiBi": lambda: model_of(named("bloom")),
    "windows": lambda: model_of(named("gemma3_text")),
}


@pytest.fixture(params=KINDS)
def shared(request):
    """A model for all threads, of each kind."""
    return KINDS[request.param]().eval()


@torch.no_grad()
def tree_pass(model):
    """Logits (nodes, vocabulary) of a tree, and a lone root's before them."""
    target = Target(model)
    cache = target.new_cache()
    prefill(target, [TEXT[0]], cache)
    length = TEXT.shape[1] - 1
    drafts = [Draft(torch.cat([TEXT[0, -1:], torch.arange(5)]), TREE.parents)]
    return target.forward(target.inputs.of(drafts, [length], length), cache)[0]


@torch.no_grad()
def plain(model):
    return model(input_ids=TEXT).logits[0]


class Gate:
    """Holds a thread's pass up in the first layer until it is opened."""

    def __init__(self, model):
        self.inside, self._open, self._thread = threading.Event(), threading.Event(), 0
        layers = next(child for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList))
        layers[0].register_forward_pre_hook(self._wait)

    def _wait(self, *given):
        if threading.get_ident() == self._thread:
            self.inside.set()
            assert self._open.wait(20)

    def hold(self, run):
        self._thread = threading.get_ident()
        return run()

    def open(self):
        self._open.set()


def test_a_plain_forward_within_another_threads_pass_attends_as_ever(shared):
    own, wanted, wanted_of_tree = shared.config._attn_implementation, plain(shared), tree_pass(shared)
    gate = Gate(shared)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(gate.hold, lambda: tree_pass(shared))
        assert gate.inside.wait(20)
        assert shared.config._attn_implementation == own
        assert torch.equal(plain(shared), wanted)
        assert torch.equal(tree_pass(shared), wanted_of_tree)
        gate.open()
        assert torch.equal(held.result(20), wanted_of_tree)
    assert shared.config._attn_implementation == own
    assert torch.equal(plain(shared), wanted)


# Implementations registered by others


@pytest.fixture
def registered():
    """Registers an attention function for the length of a test."""
    functions, masks = dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)
    yield AttentionInterface.register
    AttentionInterface._global_mapping.clear()
    AttentionInterface._global_mapping.update(functions)
    AttentionMaskInterface._global_mapping.clear()
    AttentionMaskInterface._global_mapping.update(masks)


class Recorded:
    """An attention function that writes down what it is given, and attends as another one."""

    def __init__(self, name="sdpa"):
        self.masks: list[Any] = []
        self._function = AttentionInterface()[name]

    def __call__(self, module, query, key, value, attention_mask, **others):
        self.masks.append(attention_mask)
        return self._function(module, query, key, value, attention_mask, **others)


def test_another_implementation_is_called_outside_of_passes_with_what_it_was_given(registered):
    own, model = Recorded(), tiny.llama()
    registered("own", own)
    wanted, wanted_of_tree = plain(model), tree_pass(model)
    model.config._attn_implementation = "own"
    for _ in range(2):
        assert torch.equal(plain(model), wanted)
        assert own.masks == [None] * len(model.model.layers)
        own.masks.clear()
        torch.testing.assert_close(tree_pass(model), wanted_of_tree)
        assert own.masks == [], "it takes no tree mask, as far as is known"


@pytest.mark.parametrize(
    ("table", "function"),
    [(AttentionInterface, sdpa_attention_forward), (AttentionMaskInterface, flash_attention_mask)],
)
def test_a_target_is_another_once_a_function_of_its_attention_is(registered, table, function):
    """Be it one that attends or one that makes masks, such as none: ours stands before it again."""
    registered("own", sdpa_attention_forward)
    model = tiny.llama()
    model.config._attn_implementation = "own"
    target = Target(model)
    assert target.is_current()
    table.register("own", function)
    assert not target.is_current()
    assert Target(model).is_current()


def test_what_has_no_sdpa_attends_as_its_own_eager(registered):
    model = model_of(named("gpt_oss"), "eager")
    wanted = tree_pass(model)
    registered("own", Recorded())
    model.config._attn_implementation = "own"
    torch.testing.assert_close(tree_pass(model), wanted)


# What is remembered, and taking turns


def remembered(model, what, make):
    return facts_of(model).get(what, make)


def test_one_thread_makes_what_several_want(model):
    begun, go_on, made = threading.Event(), threading.Event(), []

    def make():
        begun.set()
        assert go_on.wait(20)
        made.append(remembered(model, "a part", lambda: 1))
        return len(made)

    with ThreadPoolExecutor(4) as pool:
        wanted = [pool.submit(remembered, model, "whole", make) for _ in range(3)]
        assert begun.wait(20)
        assert pool.submit(remembered, tiny.llama(), "whole", lambda: 7).result(20) == 7, "another model waits for none"
        go_on.set()
        assert [one.result(20) for one in wanted] == [1, 1, 1]


@pytest.mark.parametrize("case", chosen(BORDERS))
def test_runs_take_turns_where_passes_change_the_model(case):
    target = Target(model_of(case))
    entered, border = threading.Event(), target.info.border

    def enter():
        with Target(target.model).turns()():
            entered.set()

    with ThreadPoolExecutor(1) as pool:
        with target.turns()(), target.turns()():
            waiting = pool.submit(enter)
            assert entered.wait(0.1 if border.changes_model else 20) != border.changes_model
        waiting.result(20)
    assert entered.is_set()
