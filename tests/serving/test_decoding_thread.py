"""Calls of `generate` from several threads, decoded together: each returns what it returns alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import tiny
from transformers import StoppingCriteriaList

import token_recycling as tr
from token_recycling.loop.continuous import RunningBatch
from token_recycling.serving.decoding_thread import DecodingThread

WAYS: list[dict[str, Any]] = [
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    {"do_sample": False, "repetition_penalty": 1.3},
    {"do_sample": True, "no_repeat_ngram_size": 2, "eos_token_id": [3, 9]},
]


@pytest.fixture
def model():
    """One of its own, that the server of other tests does not have."""
    return tiny.llama()


@pytest.fixture
def together(model):
    model.generation_config.pad_token_id = 0
    made = DecodingThread(model)
    yield made
    made.close()


def alone(model, seed, arguments):
    torch.manual_seed(seed)
    return model.generate(**arguments)


def test_calls_of_many_threads_return_what_they_return_alone(model, together):
    drafter, most = tr.make_drafter("recycling"), []
    calls = [
        {"input_ids": tiny.prompt(seed, 1 + 3 * seed), "max_new_tokens": 5 + 2 * seed, **WAYS[seed % len(WAYS)]}
        for seed in range(16)
    ]
    wanted = [alone(model, seed, arguments) for seed, arguments in enumerate(calls)]

    def called(seed):
        view = together.model(drafter, seed)
        said = view.generate(**calls[seed])
        most.append(len(together._batch.requests))
        assert view.acceleration.fallback is None
        assert view.acceleration.stats.tokens == said.shape[1] - calls[seed]["input_ids"].shape[1]
        return said

    with ThreadPoolExecutor(6) as pool:
        for ours, theirs in zip(pool.map(called, range(16)), wanted, strict=True):
            assert torch.equal(ours, theirs)
    assert max(most) > 1
    assert not hasattr(model, "acceleration")


@pytest.mark.parametrize(
    ("more", "reproducible"),
    [
        ({"input_ids": torch.cat([tiny.prompt(0, 5), tiny.prompt(1, 5)])}, False),
        ({"return_dict_in_generate": True}, False),
        ({}, True),
    ],
    ids=["batch", "cache", "reproducible"],
)
def test_what_cannot_join_is_decoded_by_itself(model, together, more, reproducible, monkeypatch):
    monkeypatch.setattr(RunningBatch, "join", None)
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False, **more}
    drafter = tr.make_drafter("recycling", reproducible=reproducible)
    wanted, said = model.generate(**arguments), together.model(drafter, 0).generate(**arguments)
    assert torch.equal(sequences(said), sequences(wanted))


def sequences(output):
    return getattr(output, "sequences", output)


@pytest.mark.parametrize("more", [{}, {"return_dict_in_generate": True}], ids=["joins", "by itself"])
def test_a_seed_samples_as_alone_and_leaves_torchs_generator_alone(model, together, more):
    """Calls run in threads of their own, so the global random state belongs to none of them."""
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 20, "do_sample": True, "temperature": 1.5, **more}
    wanted = [alone(model, seed, arguments) for seed in range(3)]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    for seed, expected in enumerate(wanted):
        sampled = together.model(tr.make_drafter("recycling"), seed).generate(**arguments)
        assert torch.equal(sequences(sampled), sequences(expected))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_is_raised_where_the_call_was_made(model, together):
    def failing(ids, scores, **_):
        raise ZeroDivisionError

    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ZeroDivisionError):
        together.model(tr.make_drafter("suffix"), 0).generate(
            **arguments, stopping_criteria=StoppingCriteriaList([failing])
        )
    said = together.model(tr.make_drafter("suffix"), 0).generate(**arguments)
    assert torch.equal(said, model.generate(**arguments))


def test_a_fault_of_the_batch_itself_ends_its_texts_and_no_others(model, together, monkeypatch):
    """Nobody waits for ever, and the next call is decoded."""
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
            pool.submit(together.model(drafter, 0).generate, input_ids=tiny.prompt(seed, 5), **arguments)
            for seed in range(2)
        ]
        for call in calls:
            with pytest.raises(ZeroDivisionError, match="a fault"):
                call.result(30)
    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(together.model(drafter, 0).generate(**arguments), model.generate(**arguments))


def test_what_is_called_between_steps_and_after_the_end(model, together):
    assert together.between_steps(lambda: 3).result(5) == 3
    with pytest.raises(ZeroDivisionError):
        together.between_steps(lambda: 1 // 0).result(5)
    accelerated = together.model(tr.make_drafter("plain"), 0)
    together.close()
    assert together.between_steps(lambda: 4).result(5) == 4, "also after the end"
    with pytest.raises(RuntimeError, match="DecodingThread is closed"):
        accelerated.generate(tiny.prompt(0, 5), max_new_tokens=8)


def test_what_is_asked_for_while_the_thread_ends_is_called(model, together):
    """In its last step, too."""
    closing, asked = threading.Thread(target=together.close, daemon=True), []

    class Streamer:
        def put(self, tokens):
            if tokens.ndim > 1:  # the prompt, before the thread decodes
                return
            if not closing.ident:
                closing.start()
                while together._functions.empty():
                    pass
            asked.append(together.between_steps(lambda: 5))

        def end(self):
            pass

    arguments = {"input_ids": tiny.prompt(0, 5), "max_new_tokens": 8, "do_sample": False}
    wanted = model.generate(**arguments)
    assert torch.equal(together.model(tr.make_drafter("plain"), 0).generate(**arguments, streamer=Streamer()), wanted)
    assert [answer.result(5) for answer in asked] == [5] * len(asked)
    closing.join(5)
    assert not closing.is_alive()
