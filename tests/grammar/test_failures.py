"""Failures of a grammar library cost drafts, never the call or its output; times change no reproducible drafts."""

from __future__ import annotations

import logging
from itertools import product

import numpy as np
import pytest
import torch
from support import tiny
from support.automata import AutomatonProcessor, _Place, random_automaton
from support.cases import thinned
from transformers import TemperatureLogitsWarper

import token_recycling as tr
from token_recycling.grammar import adapters
from token_recycling.grammar.constraint import constraint_of
from token_recycling.grammar.state import State
from token_recycling.model.target import Target

PROMPT = tiny.prompt(0, 6)


class PanicError(BaseException):
    """An error like those of compiled libraries, which is no `Exception`."""


def failing(error, after=0):
    """Return a function that returns None `after` times, then raises the error."""
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) > after:
            raise error

    return fail


class Failing(AutomatonProcessor):
    """One method of its matcher fails, immediately or later."""

    def __init__(self, automaton, method, error, after):
        super().__init__(automaton, 64)
        self.failing, self.fail = method, failing(error, after)

    def first_state(self):
        if self._read:
            return None
        if self.failing == "first_state":
            self.fail()
        return State(FailingPlace(self._automaton, 0, self), 2)


class FailingPlace(_Place):
    def __init__(self, automaton, place, owner):
        super().__init__(automaton, place)
        self._owner = owner

    def _run(self, method):
        if self._owner.failing == method:
            self._owner.fail()

    def fill(self, mask: np.ndarray) -> None:
        self._run("fill")
        super().fill(mask)

    def after(self, token):
        self._run("after")
        return FailingPlace(self._automaton, self._automaton[self._place][token], self._owner)

    @property
    def forced(self):
        self._run("forced")
        return super().forced


AUTOMATON, ARGUMENTS = random_automaton(1), {"max_new_tokens": 30, "do_sample": False}
FAULT, PANIC = ValueError("max() of an empty sequence"), PanicError("index out of bounds")


@pytest.fixture(scope="module")
def plain():
    return tiny.llama().generate(PROMPT, **ARGUMENTS, logits_processor=[AutomatonProcessor(AUTOMATON, 64)])


METHODS, DRAFTERS = ["first_state", "fill", "after", "forced"], ["recycling", "prompt_lookup"]


@pytest.mark.parametrize(
    ("method", "after", "drafter", "error"), thinned(product(METHODS, [0, 3], DRAFTERS, [FAULT, PANIC]), every=5)
)
def test_failing_library_does_not_change_the_output(model, plain, drafter, method, after, error):
    for _ in range(2):
        processor = Failing(AUTOMATON, method, error, after)
        text = tr.generate(model, PROMPT, drafter=drafter, logits_processor=[processor], **ARGUMENTS)
        assert torch.equal(text, plain)


def test_failure_is_logged(model, caplog):
    processor = Failing(random_automaton(1), "first_state", ValueError("no transitions"), 0)
    with caplog.at_level(logging.WARNING, "token_recycling"):
        tr.generate(model, PROMPT, logits_processor=[processor], max_new_tokens=4, do_sample=False)
    assert "no transitions" in caplog.text


def test_keyboard_interrupt_is_raised(model):
    processor = Failing(random_automaton(1), "fill", KeyboardInterrupt(), 0)
    with pytest.raises(KeyboardInterrupt):
        tr.generate(model, PROMPT, logits_processor=[processor], max_new_tokens=4, do_sample=False)


def outlines_core_without_transitions():
    """Return a processor like that of outlines, whose index has no transitions and so reveals no vocabulary."""

    class Index:
        def get_transitions(self):
            return {}

    processor = type("OutlinesCoreLogitsProcessor", (AutomatonProcessor,), {"first_state": None})([{0: 0}], 64)
    type(processor).__module__ = "outlines.backends.outlines_core"
    type(processor).__qualname__ = "OutlinesCoreLogitsProcessor"
    processor.is_first_token, processor.index = True, Index()
    return processor


def renamed_attribute():
    """Return a processor like that of a later release, which has renamed an attribute."""
    processor = AutomatonProcessor([{0: 0}], 64)
    kind = type("LogitsProcessor", (AutomatonProcessor,), {"__module__": "xgrammar.contrib.hf", "first_state": None})
    kind.__qualname__ = "LogitsProcessor"
    processor.__class__ = kind
    return processor


@pytest.mark.parametrize("make", [outlines_core_without_transitions, renamed_attribute])
@pytest.mark.falls_back
def test_missing_private_attributes_disable_the_constraint(model, make):
    assert constraint_of([make()], PROMPT, 6) is None
    text = tr.generate(model, PROMPT, logits_processor=[make()], max_new_tokens=5, do_sample=False)
    assert text[0, 6:].tolist() == [0] * 5
    two = tr.generate(model, PROMPT.repeat(2, 1), logits_processor=[make()], max_new_tokens=5, do_sample=False)
    assert two[:, 6:].tolist() == [[0] * 5] * 2


def test_state_without_a_mask_allows_every_token_and_has_no_successors():
    state = State(FailingPlace([{1: 0}], 0, Failing([{1: 0}], "fill", ValueError(), 0)), 2)
    assert state.allows(np.arange(64)).all()
    assert state.after(1) is None
    assert state.forced == ""


@pytest.mark.parametrize("reproducible", [True, False])
def test_mask_time_changes_drafts_only_if_not_reproducible(model, monkeypatch, reproducible):
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.contrib.hf import LogitsProcessor

    vocabulary = [chr(97 + token % 26) * (1 + token // 26) for token in range(63)] + ["</s>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[63]))
    compiled = compiler.compile_grammar('root ::= ("abcde" | "xyz")*')

    def drafted(slow):
        monkeypatch.setattr(adapters, "_SLOW", -1.0 if slow else 1e9)
        steps = tr.stream(
            model, PROMPT, max_new_tokens=24, logits_processor=[LogitsProcessor(compiled)], reproducible=reproducible
        )
        return [(step.draft.parents.tolist(), step.draft.tokens.tolist(), step.tokens) for step in steps]

    assert (drafted(slow=True) == drafted(slow=False)) == reproducible


@pytest.mark.parametrize("processes", [1, 2])
def test_mask_time_is_ignored_with_several_processes(model, monkeypatch, processes):
    """Ranks with different drafts would wait for each other forever."""
    timed = []
    monkeypatch.setattr(
        "token_recycling.grammar.constraint.constraint_of",
        lambda processors, padded, length, decides, statistics: timed.append(decides),
    )
    target = Target(model)
    target.processes = processes
    monkeypatch.setattr("token_recycling.hf.stream.ready", lambda _: target)
    list(tr.stream(model, PROMPT, "prompt_lookup", max_new_tokens=2, logits_processor=[TemperatureLogitsWarper(2.0)]))
    assert timed == [processes == 1]
