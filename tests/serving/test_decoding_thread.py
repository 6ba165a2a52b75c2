"""Calls of `generate` from several threads, decoded in one batch: each returns the output of a separate call."""

from __future__ import annotations

import queue
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import tiny
from transformers import StoppingCriteriaList

import token_recycling as tr
from token_recycling._util.text_stream import StepRecorder
from token_recycling.loop.continuous import RunningBatch
from token_recycling.serving.decoding_thread import DecodingThread

SETTINGS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": True, "no_repeat_ngram_size": 2, "eos_token_id": [3, 9]},
]


@pytest.fixture
def model():
    """A model that no server of other tests uses."""
    return tiny.llama()


@pytest.fixture
def decoder(model):
    model.generation_config.pad_token_id = 0
    decoder = DecodingThread(model)
    yield decoder
    decoder.close()


def generate_with_seed(model, seed, arguments):
    torch.manual_seed(seed)
    return model.generate(**arguments)


def test_concurrent_calls_equal_separate_calls(model, decoder):
    drafter, batch_sizes = tr.make_drafter("recycling"), []
    calls = [
        {"input_ids": tiny.prompt(seed, 1 + 3 * seed), "max_new_tokens": 5 + 2 * seed, **SETTINGS[seed % len(SETTINGS)]}
        for seed in range(16)
    ]
    wanted = [generate_with_seed(model, seed, arguments) for seed, arguments in enumerate(calls)]

    def called(seed):
        view = decoder.model(drafter, seed)
        said = view.generate(**calls[seed])
        batch_sizes.append(len(decoder._batch.requests))
        assert view.acceleration.fallback is None
        assert view.acceleration.stats.tokens == said.shape[1] - calls[seed]["input_ids"].shape[1]
        return said

    with ThreadPoolExecutor(6) as pool:
        for ours, theirs in zip(pool.map(called, range(16)), wanted, strict=True):
            assert torch.equal(ours, theirs)
    assert max(batch_sizes) > 1
    assert not hasattr(model, "acceleration")


@pytest.mark.parametrize(
    ("more", "reproducible"),
    [
        ({"input_ids": torch.cat([tiny.prompt(0, 5), tiny.prompt(1, 5)])}, False),
        ({"return_dict_in_generate": True}, False),
        ({}, True),
    ],
    ids=["batch", "returned cache", "reproducible"],
)
def test_call_that_cannot_be_batched_is_decoded_separately(model, decoder, more, reproducible, monkeypatch):
    monkeypatch.setattr(RunningBatch, "join", None)
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False, **more}
    drafter = tr.make_drafter("recycling", reproducible=reproducible)
    wanted, said = model.generate(**arguments), decoder.model(drafter, 0).generate(**arguments)
    assert torch.equal(sequences(said), sequences(wanted))


def sequences(output):
    return getattr(output, "sequences", output)


@pytest.mark.parametrize("more", [{}, {"return_dict_in_generate": True}], ids=["batched", "separate"])
def test_seeded_call_equals_generate_and_keeps_the_global_random_state(model, decoder, more):
    """Calls run in several threads, so none of them may use the global random state."""
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 20, "do_sample": True, "temperature": 1.5, **more}
    wanted = [generate_with_seed(model, seed, arguments) for seed in range(3)]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for seed, expected in enumerate(wanted):
        sampled = decoder.model(tr.make_drafter("recycling"), seed).generate(**arguments)
        assert torch.equal(sequences(sampled), sequences(expected))
    assert torch.equal(torch.get_rng_state(), before)


def test_error_is_raised_in_the_calling_thread(model, decoder, monkeypatch):
    def failing(*_, **__):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(RunningBatch, "join", failing)
        with pytest.raises(ZeroDivisionError):
            decoder.model(tr.make_drafter("suffix"), 0).generate(tiny.prompt(0, 5))
    assert not decoder._waiting, "nothing waits for a request that has not joined"
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ZeroDivisionError):
        decoder.model(tr.make_drafter("suffix"), 0).generate(
            **arguments, stopping_criteria=StoppingCriteriaList([failing])
        )
    said = decoder.model(tr.make_drafter("suffix"), 0).generate(**arguments)
    assert torch.equal(said, model.generate(**arguments))
    draft, received = (lambda self, context: tr.Draft.chain(said[0, len(context.tokens) - 1 :])), []
    for generate in (model.generate, decoder.model(type("Known", (tr.Drafter,), {"draft": draft})(), 0).generate):
        recorder = StepRecorder()
        with pytest.raises(ZeroDivisionError):
            generate(**arguments, streamer=recorder, stopping_criteria=[lambda ids, _, **__: 0 // (10 - ids.shape[1])])
        received.append(recorder.tokens)
    assert received[1] == received[0] == said[0, 5:9].tolist(), "also the tokens of the failed step"


def test_batch_error_fails_running_calls_but_not_later_ones(model, decoder, monkeypatch):
    """No call waits forever."""
    drop, faults = RunningBatch._drop, iter([ZeroDivisionError("a fault")])

    def faulty(batch):
        fault = next(faults, None) if len(batch.requests) > 1 else None
        if fault is not None:
            raise fault
        return drop(batch)

    monkeypatch.setattr(RunningBatch, "_drop", faulty)
    arguments = {"max_new_tokens": 400, "do_sample": False}
    drafter = tr.make_drafter("plain")
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(decoder.model(drafter, 0).generate, input_ids=tiny.prompt(seed, 5), **arguments)
            for seed in range(2)
        ]
        for call in calls:
            with pytest.raises(ZeroDivisionError, match="a fault"):
                call.result(30)
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(decoder.model(drafter, 0).generate(**arguments), model.generate(**arguments))


def test_between_steps_runs_functions_before_and_after_close(decoder):
    assert decoder.between_steps(lambda: 3).result(5) == 3
    with pytest.raises(ZeroDivisionError):
        decoder.between_steps(lambda: 1 // 0).result(5)
    accelerated = decoder.model(tr.make_drafter("plain"), 0)
    decoder.close()
    assert decoder.between_steps(lambda: 4).result(5) == 4, "after close"
    with pytest.raises(RuntimeError, match="DecodingThread is closed"):
        accelerated.generate(tiny.prompt(0, 5), max_new_tokens=8)


class StepByStep:
    """A streamer that holds the decoding thread after each token until the test continues."""

    def __init__(self):
        self.chosen, self.going_on = queue.SimpleQueue(), queue.SimpleQueue()

    def put(self, tokens):
        if tokens.ndim == 1:  # the prompt has two dimensions: it comes before the thread decodes
            self.chosen.put(tokens)
            self.going_on.get(timeout=30)

    def end(self):
        pass


def test_functions_queued_during_close_are_called(model, decoder):
    """Including those queued in the last step."""
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(**arguments)
    streamer, accelerated = StepByStep(), decoder.model(tr.make_drafter("plain"), 0)
    with ThreadPoolExecutor(2) as pool:
        output = pool.submit(accelerated.generate, **arguments, streamer=streamer)
        streamer.chosen.get(timeout=30)
        closing, deadline = pool.submit(decoder.close), time.monotonic() + 30
        while decoder._functions.empty():
            assert time.monotonic() < deadline, "close() has queued nothing"
        asked = [decoder.between_steps(lambda: 5)]
        for _ in range(7):
            streamer.going_on.put(None)
            streamer.chosen.get(timeout=30)
            asked.append(decoder.between_steps(lambda: 5))
        streamer.going_on.put(None)
        assert torch.equal(output.result(30), wanted)
        closing.result(30)
    assert accelerated.acceleration.fallback is None
    assert [answer.result(5) for answer in asked] == [5] * 8
