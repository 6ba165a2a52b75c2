"""Continuous batching with captured passes: requests join and leave the slots of replayed graphs."""

import random

import pytest
import torch
from support import tiny
from support.architectures import model_of, named
from support.cases import thinned
from support.drafters import example
from support.running import GoneError, Texts
from support.runs import plain
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

import token_recycling as tr
from token_recycling.loop.request import Hints
from token_recycling.model.backend import Backend
from token_recycling.model.graphs.support import passes_or_reason
from token_recycling.model.prefixes import PrefixCache
from token_recycling.model.target import Target
from token_recycling.serving.decoding_thread import DecodingThread

KINDS = {
    "greedy": ({}, []),
    "penalize": ({"repetition_penalty": 1.3}, [RepetitionPenaltyLogitsProcessor(1.3)]),
    "sampled": ({"do_sample": True, "temperature": 0.8, "top_k": 0}, [TemperatureLogitsWarper(0.8)]),
}
pytestmark = pytest.mark.usefixtures("recorded")


@pytest.mark.parametrize(
    ("family", "seed"), thinned([("gemma2 window of 8", 1), ("llama", 0), ("mistral window of 8", 2)])
)
def test_requests_that_join_and_leave_equal_single_decoding(family, seed):
    """Requests of every kind and length, with several drafters, exceed the initial batch slots; those that leave early
    have emitted a prefix of their output.
    """
    model, chance = tiny.llama() if family == "llama" else model_of(named(*family.split(" ", 1))), random.Random(seed)
    texts, shared, wanted = Texts(model, Backend(True)), tr.make_drafter("recycling:tree=12"), {}
    for number in range(14):
        kind, ids = chance.choice(sorted(KINDS)), tiny.prompt(number, chance.choice([1, 3, 33, 70]))
        arguments, processors = KINDS[kind]
        torch.manual_seed(number)
        new = chance.randrange(1, 40)
        output = plain(model, ids, new, **arguments)
        drafter = chance.choice([shared, "suffix", "plain", "published:tree=chain:3"])
        wanted[texts.join(ids, new, drafter, number if kind == "sampled" else None, processors)] = output
        for _ in range(chance.randrange(4)):
            texts.step()
        if number % 5 == 4 and texts.batch.requests:
            texts.batch.requests[0].fail(GoneError())
    texts.finish()
    for request, output in wanted.items():
        left = isinstance(request.error, GoneError)
        assert texts.outputs[request] == (output[: len(texts.outputs[request])] if left else output), request.error
    passes = passes_or_reason(Target(model))
    assert passes.batch > 4
    assert passes._graphs.replays > 20
    assert passes.acquire(), "the slots were released"


def test_capacity_grows_while_requests_run():
    model = tiny.llama(max_position_embeddings=2048, num_hidden_layers=1)
    texts, prompts = Texts(model, Backend(True)), [tiny.prompt(0, 12), tiny.prompt(1, 1200)]
    rows = [texts.join(prompts[0], 60)]
    for _ in range(3):
        texts.step()
    rows.append(texts.join(prompts[1], 20))
    texts.finish()
    for row, ids, new in zip(rows, prompts, (60, 20), strict=True):
        assert texts.outputs[row] == plain(model, ids, new)


def test_finished_requests_are_stored_in_the_prefix_cache():
    model, ids = tiny.llama(), tiny.prompt(0, 20)
    texts, kept = Texts(model, Backend(True)), PrefixCache(Target(model), 10**8)
    hints = Hints(prefixes=kept.of(""))
    for turn in range(2):
        others = texts.join(tiny.prompt(5, 8), 30)
        row = texts.join(ids, 12, hints=hints)
        texts.finish()
        output = texts.outputs[row]
        assert output == plain(model, ids, 12)
        assert texts.outputs[others] == plain(model, tiny.prompt(5, 8), 30)
        assert bool(row.stats.cached_tokens) == bool(turn)
        ids = torch.cat([ids, torch.tensor([output])], dim=1)


@pytest.mark.parametrize("drafter", ["recycling:tree=12", "eagle"])
def test_decoding_thread_uses_captured_passes(drafter, tmp_path):
    model = tiny.llama()
    thread = DecodingThread(model, Backend(True))
    made = example(drafter, model, tmp_path) if drafter == "eagle" else tr.make_drafter(drafter)
    try:
        for seed in range(3):
            ids, view = tiny.prompt(seed, 9), thread.model(made, 0)
            ours = view.generate(ids, max_new_tokens=20, do_sample=False)
            assert torch.equal(ours, model.generate(ids, max_new_tokens=20, do_sample=False))
            assert view.acceleration.stats.path.startswith("fast")
    finally:
        thread.close()
