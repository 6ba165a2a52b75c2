"""One text of a model at a time: whose turn it is, who waits for it, and who need not."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event

import pytest
import torch
from support import tiny
from support.adapters import adapted
from support.runs import decoded, plain
from transformers import StoppingCriteriaList

import token_recycling as tr
from token_recycling.model.graphs.passes import CapturedPasses
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.target import Target

TEXTS = [tiny.prompt(seed, 6) for seed in range(2)]
LONGEST = 30
"""Seconds that a test waits before it fails."""


class Waited:
    """Sees that a thread waits for its turn, and lets something happen before it goes on."""

    def __init__(self, monkeypatch):
        self.began, self.then = Event(), lambda: None
        wait = CapturedPasses.wait

        def seen(passes):
            self.began.set()
            waited = wait(passes)
            self.then()
            return waited

        monkeypatch.setattr(CapturedPasses, "wait", seen)


@pytest.fixture
def waited(monkeypatch, recorded):
    return Waited(monkeypatch)


class Held:
    """A call of `generate` in captured passes, in a thread of its own, that goes on when it may."""

    def __init__(self, pool, model, ids):
        self.begun, self.may = Event(), Event()
        self._call = pool.submit(
            tr.generate,
            model,
            ids,
            drafter="plain",
            fast=True,
            max_new_tokens=20,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([self._wait]),
        )
        assert self.begun.wait(LONGEST)

    def _wait(self, ids, scores, **_):
        self.begun.set()
        assert self.may.wait(LONGEST)
        return torch.zeros(len(ids), dtype=torch.bool)

    def text(self):
        self.may.set()
        return self._call.result(LONGEST)[0, TEXTS[0].shape[1] :].tolist()


def test_another_thread_waits_where_they_are_insisted_on(model, waited):
    wanted = [plain(model, ids) for ids in TEXTS]
    with ThreadPoolExecutor(2) as pool:
        first = Held(pool, model, TEXTS[0])
        second = pool.submit(decoded, model, TEXTS[1], "plain", max_new_tokens=20)
        assert waited.began.wait(LONGEST)
        assert not second.done()
        assert first.text() == wanted[0]
        text, stats = second.result(LONGEST)
    assert text == wanted[1]
    assert stats.path.startswith("fast")


def test_a_model_that_changes_meanwhile_is_captured_anew(model, waited):
    head = adapted(model)
    waited.then = lambda: setattr(head, "active", ["b"])
    with ThreadPoolExecutor(2) as pool:
        first = Held(pool, model, TEXTS[0])
        second = pool.submit(decoded, model, TEXTS[1], "plain", max_new_tokens=20)
        assert waited.began.wait(LONGEST)
        first.text()
        text, _ = second.result(LONGEST)
    assert head.active == ["b"]
    assert text == plain(model, TEXTS[1])
    head.active = ["a"]
    assert text != plain(model, TEXTS[1])


def test_nobody_waits_otherwise(model, waited):
    """Another thread may also end the call that was begun."""
    wanted = plain(model, TEXTS[1])
    first = tr.stream(model, TEXTS[0], "plain", fast=True, max_new_tokens=20)
    next(first)
    with ThreadPoolExecutor(1) as other:
        text, stats = other.submit(decoded, model, TEXTS[1], "plain", False, max_new_tokens=20).result(LONGEST)
        assert text == wanted
        assert stats.path == "eager"
        with pytest.raises(tr.NoFastPathError, match="another call"):
            decoded(model, TEXTS[1], "plain", max_new_tokens=20)
        other.submit(first.close).result(LONGEST)  # type: ignore[attr-defined]
    assert decoded(model, TEXTS[1], "plain", max_new_tokens=20)[0] == wanted


def test_threads_make_them_once(model):
    together = Barrier(4)

    def found(_):
        target = Target(model)
        together.wait(LONGEST)
        return passes_or_reason(target)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(found, range(4)))) == 1
