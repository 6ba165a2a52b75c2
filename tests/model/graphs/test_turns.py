"""Captured passes of a model serve one call at a time: which calls wait for their turn, and which do not."""

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

PROMPTS = [tiny.prompt(seed, 6) for seed in range(2)]
TIMEOUT = 30
"""Seconds that a test waits before it fails."""


class ObservedWait:
    """Signal that a thread waits for its turn, and run a function before the thread continues."""

    def __init__(self, monkeypatch):
        self.began, self.then = Event(), lambda: None
        wait = CapturedPasses.wait

        def observed(passes):
            self.began.set()
            result = wait(passes)
            self.then()
            return result

        monkeypatch.setattr(CapturedPasses, "wait", observed)


@pytest.fixture
def observed_wait(monkeypatch, recorded):
    return ObservedWait(monkeypatch)


class PausedCall:
    """A call of `generate` with captured passes, in a pool's thread, that pauses until its output is requested."""

    def __init__(self, pool, model, ids):
        self._begun, self._resume = Event(), Event()
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
        assert self._begun.wait(TIMEOUT)

    def _wait(self, ids, scores, **_):
        self._begun.set()
        assert self._resume.wait(TIMEOUT)
        return torch.zeros(len(ids), dtype=torch.bool)

    def output(self):
        self._resume.set()
        return self._call.result(TIMEOUT)[0, PROMPTS[0].shape[1] :].tolist()


def test_fast_call_waits_for_the_call_of_another_thread(model, observed_wait):
    wanted = [plain(model, ids) for ids in PROMPTS]
    with ThreadPoolExecutor(2) as pool:
        first = PausedCall(pool, model, PROMPTS[0])
        second = pool.submit(decoded, model, PROMPTS[1], "plain", max_new_tokens=20)
        assert observed_wait.began.wait(TIMEOUT)
        assert not second.done()
        assert first.output() == wanted[0]
        text, stats = second.result(TIMEOUT)
    assert text == wanted[1]
    assert stats.path.startswith("fast")


def test_model_changed_during_the_wait_is_captured_again(model, observed_wait):
    head = adapted(model)
    observed_wait.then = lambda: setattr(head, "active", ["b"])
    with ThreadPoolExecutor(2) as pool:
        first = PausedCall(pool, model, PROMPTS[0])
        second = pool.submit(decoded, model, PROMPTS[1], "plain", max_new_tokens=20)
        assert observed_wait.began.wait(TIMEOUT)
        first.output()
        text, _ = second.result(TIMEOUT)
    assert head.active == ["b"]
    assert text == plain(model, PROMPTS[1])
    head.active = ["a"]
    assert text != plain(model, PROMPTS[1])


def test_eager_calls_and_calls_of_the_same_thread_do_not_wait(model, observed_wait):
    """Another thread may also close the first call."""
    wanted = plain(model, PROMPTS[1])
    first = tr.stream(model, PROMPTS[0], "plain", fast=True, max_new_tokens=20)
    next(first)
    with ThreadPoolExecutor(1) as other:
        text, stats = other.submit(decoded, model, PROMPTS[1], "plain", False, max_new_tokens=20).result(TIMEOUT)
        assert text == wanted
        assert stats.path == "eager"
        with pytest.raises(tr.NoFastPathError, match="another call"):
            decoded(model, PROMPTS[1], "plain", max_new_tokens=20)
        other.submit(first.close).result(TIMEOUT)  # type: ignore[attr-defined]
    assert decoded(model, PROMPTS[1], "plain", max_new_tokens=20)[0] == wanted


def test_failed_capture_in_advance_frees_the_passes(model, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(CapturedPasses, "capture_common", fail)
        with pytest.raises(torch.OutOfMemoryError):
            tr.accelerate(model, fast=True)
    assert decoded(model, PROMPTS[1], "plain", max_new_tokens=20)[0] == plain(model, PROMPTS[1])


def test_threads_create_captured_passes_once(model):
    together = Barrier(4)

    def passes(_):
        target = Target(model)
        together.wait(TIMEOUT)
        return passes_or_reason(target)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(passes, range(4)))) == 1
