"""Concurrent calls in several threads on one model and one drafter: each output equals that of `generate` alone."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support import architectures, tiny
from support.batches import batch
from support.cases import thinned
from support.drafters import example
from support.noting import own
from support.oracle import Oracle
from support.recurrent_architectures import recurrent

import token_recycling as tr
from token_recycling.model.target import Target

pytestmark = pytest.mark.usefixtures("switching_often")

THREADS, CALLS, NEW = 3, 6, 16


def concurrently(calls):
    """Return the results of calls that run in `THREADS` threads, which start simultaneously."""
    begin = threading.Barrier(THREADS)

    def some(first):
        begin.wait(30)
        return [call() for call in calls[first::THREADS]]

    with ThreadPoolExecutor(THREADS) as pool:
        made = list(pool.map(some, range(THREADS)))
    return [made[place % THREADS][place // THREADS] for place in range(len(calls))]


def prompts(model):
    size = model.config.vocab_size
    return [tiny.prompt(seed, 3 + 2 * seed, size).repeat(1, 2) for seed in range(CALLS)]


def arguments(ids):
    return {"input_ids": ids, "max_new_tokens": NEW}


@pytest.mark.parametrize("name", thinned(tr.drafter_names(), kept=("recycling", "draft_model").__contains__))
def test_concurrent_outputs_equal_those_of_generate(model, name, tmp_path):
    wanted = [model.generate(**arguments(ids)) for ids in prompts(model)]
    config = model.config.to_dict()
    tr.accelerate(model, example(name, model, tmp_path))
    try:
        found = concurrently([lambda ids=ids: model.generate(**arguments(ids)) for ids in prompts(model)])
        assert model.acceleration.total.tokens == CALLS * NEW
    finally:
        tr.decelerate(model)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    assert model.config.to_dict() == config


def test_concurrent_calls_of_different_surfaces(model):
    """Batches, streams, single calls and bare forward passes, with one drafter."""
    drafter, ids = tr.make_drafter("recycling"), prompts(model)
    inputs = batch([4, 9, 5], 1)
    wanted_batch, wanted = (
        model.generate(**inputs, max_new_tokens=NEW, pad_token_id=0),
        model.generate(ids[0], max_new_tokens=NEW),
    )
    logits = model(ids[1]).logits

    def streamed():
        tokens = [token for step in tr.stream(model, ids[0], drafter, max_new_tokens=NEW) for token in step.tokens]
        return torch.cat([ids[0], torch.tensor([tokens])], dim=1)

    def forward():
        with torch.no_grad():
            return torch.stack([model(ids[1]).logits for _ in range(20)]).amax(0)

    calls = [
        lambda: tr.generate(model, **inputs, drafter=drafter, max_new_tokens=NEW, pad_token_id=0),
        streamed,
        forward,
        forward,
        lambda: tr.generate(model, ids[0], drafter=drafter, max_new_tokens=NEW),
    ]
    expected = [wanted_batch, wanted, logits, logits, wanted]
    for ours, theirs in zip(concurrently(calls), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if ours.dtype == torch.int64 else 1e-6)


@pytest.mark.parametrize(
    "case",
    [
        *architectures.chosen(
            case for case in architectures.BORDERS if "rotary" in str(case) or "longrope" in str(case)
        ),
        recurrent("qwen3_5_text"),
    ],
    ids=str,
)
def test_models_changed_by_forward_passes_decode_one_sequence_at_a_time(case):
    """All prompts are shorter than the length threshold, so every call begins with the model as loaded."""
    calls = [tiny.prompt(seed, 5 + 4 * seed, architectures.VOCABULARY) for seed in range(CALLS)]
    wanted = [architectures.model_of(case).generate(ids, max_new_tokens=NEW) for ids in calls]
    model = tr.accelerate(architectures.model_of(case))
    found = concurrently([lambda ids=ids: model.generate(ids, max_new_tokens=NEW) for ids in calls])
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_first_passes_of_a_hybrid_in_two_threads():
    """The modules of a recurrent layer are found in its first pass over a tree, here in both calls simultaneously."""
    model, ids = architectures.model_of(recurrent("qwen3_5_text")), tiny.prompt(0, 5, architectures.VOCABULARY)
    wanted, others, texts = model.generate(ids, max_new_tokens=NEW), [], []

    def in_between(part, args, output):
        if args[0].shape[1] == 1 and not others:  # a node of a tree, read by itself
            others.append(threading.Thread(target=call))
            others[0].start()
            others[0].join(60)

    def call():
        stats, drafter = tr.Stats(), Oracle([wanted[0]])  # whose nodes are accepted
        texts.append(tr.generate(model, ids, drafter=drafter, max_new_tokens=NEW, stats=stats))
        assert 0 < stats.steps < NEW

    (layer,) = {mixer.module for mixer in Target(model).mixers[:1]}
    linear = [part for part in layer.children() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_hook(own(in_between)) for part in linear]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    assert others
    assert [text.tolist() for text in texts] == [wanted.tolist()] * 2
