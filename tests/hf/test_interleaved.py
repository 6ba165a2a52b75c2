"""Half-consumed streams: no call waits for them forever, and each yields the same tokens as alone."""

from __future__ import annotations

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import chain as chained
from itertools import zip_longest

import pytest
import torch
from support import tiny
from support.architectures import BORDERS, VOCABULARY, chosen, forget, model_of

import token_recycling as tr
from token_recycling.model.runner import NoFastPathError

DYNAMIC = [case for case in BORDERS if "rotary" in str(case) or "longrope" in str(case)]
NEW = 40
LENGTHS = (6, 20, 40)


def tokens_alone(model, ids):
    forget(model)
    text = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    forget(model)
    return text[0, ids.shape[1] :].tolist()


def tokens_of(steps):
    return [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("case", chosen(DYNAMIC), ids=str)
def test_interleaved_streams_yield_the_same_tokens_as_alone(case):
    model = model_of(case)
    prompts = [tiny.prompt(length, length, VOCABULARY) for length in LENGTHS]
    wanted = [tokens_alone(model, ids) for ids in prompts]
    streams = [tr.stream(model, ids, max_new_tokens=NEW) for ids in prompts]
    rounds = [*zip_longest(*streams)]
    assert [tokens_of(filter(None, steps)) for steps in zip(*rounds, strict=True)] == wanted


@pytest.mark.parametrize("case", chosen(DYNAMIC), ids=str)
def test_other_calls_within_a_stream(case):
    """In this thread and in another, accelerated and plain, with longer and shorter sequences."""
    model = model_of(case)
    prompts = [tiny.prompt(length, length, VOCABULARY) for length in LENGTHS]
    wanted = [tokens_alone(model, ids) for ids in prompts]
    stream = tr.stream(model, prompts[0], max_new_tokens=NEW)
    steps = [next(stream) for _ in range(4)]
    with ThreadPoolExecutor(1) as pool:
        for run in (lambda call: call(), lambda call: pool.submit(call).result(60)):
            for ids, text in zip(prompts, wanted, strict=True):
                for generate in (model.generate, lambda *one, **how: tr.generate(model, *one, **how)):
                    found = run(lambda: generate(ids, max_new_tokens=NEW, do_sample=False))  # noqa: B023
                    assert found[0, ids.shape[1] :].tolist() == text
                    forget(model)
    assert tokens_of(chained(steps, stream)) == wanted[0]


def test_closed_stream_leaves_the_model_unchanged():
    model = model_of(DYNAMIC[-1])
    ids = tiny.prompt(0, 6, VOCABULARY)
    wanted = tokens_alone(model, ids)
    stream = tr.stream(model, tiny.prompt(1, 60, VOCABULARY), max_new_tokens=NEW)
    next(stream)
    stream.close()
    assert model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, 6:].tolist() == wanted


def test_fast_stream_does_not_block_other_calls(model):
    """Another fast call is rejected immediately in any thread, until the stream is closed."""
    ids = tiny.prompt(0, 6)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)

    def call(**how):
        return tr.generate(model, ids, max_new_tokens=8, do_sample=False, **how)

    stream = tr.stream(model, ids, max_new_tokens=NEW, fast=True)
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        for run in (lambda one: one(), lambda one: pool.submit(one).result(60)):
            with pytest.raises(NoFastPathError, match="stream"):
                run(lambda: call(fast=True))
            with pytest.raises(NoFastPathError, match="stream"):
                run(lambda: next(tr.stream(model, ids, fast=True)))
            assert torch.equal(run(call), wanted)
        next(stream)
        stream.close()
        assert torch.equal(pool.submit(call, fast=True).result(60), wanted)


def test_concurrent_fast_calls_wait_for_each_other(model):
    ids = tiny.prompt(0, 6)
    wanted = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(tr.generate, model, ids, max_new_tokens=NEW, do_sample=False, fast=True) for _ in range(8)]
        assert all(torch.equal(call.result(60), wanted) for call in calls)


def test_suspended_stream_leaves_dynamic_frequencies_as_they_were():
    """Those of a longer prompt would stay: a prompt beyond the original length never makes them shorter."""
    model = tiny.llama(max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    ids, asked = torch.arange(2, 47)[None], {"max_new_tokens": 3, "do_sample": False, "output_logits": True}
    fresh = copy.deepcopy(model).generate(ids, return_dict_in_generate=True, **asked)
    with contextlib.closing(tr.stream(model, torch.arange(1, 61), max_new_tokens=20)) as steps:
        next(steps)
        meanwhile = model.generate(ids, return_dict_in_generate=True, **asked)
    assert torch.equal(torch.stack(meanwhile.logits), torch.stack(fresh.logits))


def test_suspended_stream_keeps_its_own_dynamic_frequencies():
    """Those of a longer prompt, which another call has left, are not used."""
    model = tiny.llama(max_position_embeddings=32, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    ids, longer = torch.arange(1, 61), torch.arange(100)[None] % 60 + 1
    wanted = copy.deepcopy(model).generate(
        ids[None], max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    with contextlib.closing(tr.stream(model, ids, max_new_tokens=4)) as steps:
        found = [next(steps)]
        model.generate(longer, max_new_tokens=2, do_sample=False)
        found += steps
    torch.testing.assert_close(torch.cat([step.logits for step in found]), torch.cat(wanted.logits))
