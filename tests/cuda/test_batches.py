"""On a card: batches of every shape, calls of many threads, and requests in one running batch."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import tiny
from support.batches import batch
from support.on_device import check_path, check_same, moved

import token_recycling as tr
from token_recycling.model.backend import EAGER, Backend
from token_recycling.serving.decoding_thread import DecodingThread

pytestmark = pytest.mark.cuda

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "ends": {"do_sample": False, "eos_token_id": [3, 9, 21]},
    "penalties": {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("drafter", ["recycling", "published", "fuse"])
def test_padded_batches(placed, device, drafter, way):
    made = tr.make_drafter("fuse", parts="recycling+suffix") if drafter == "fuse" else tr.make_drafter(drafter)
    for seed, lengths in enumerate([[4, 9], [1, 1, 1], [12, 3, 7], [5] * 8]):
        given = moved(batch(lengths, seed, spare=seed % 2), device)
        wanted = placed.generate(**given, max_new_tokens=24, **way)
        check_same(placed, given, tr.generate(placed, **given, drafter=made, max_new_tokens=24, **way), wanted)


@pytest.mark.parametrize("fast", [True, False])
def test_many_threads_on_one_model(placed, device, fast):
    """One thread at a time uses the slots of the fast path; the others wait."""
    prompts = [tiny.prompt(seed, 5 + seed).to(device) for seed in range(8)]
    wanted = [placed.generate(ids, max_new_tokens=24, do_sample=False) for ids in prompts]
    drafter = tr.make_drafter("recycling:tree=paper")

    def decode(ids):
        stats = tr.Stats()
        how = {"drafter": drafter, "fast": fast, "stats": stats, "do_sample": False}
        return tr.generate(placed, ids, max_new_tokens=24, **how), stats

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(decode, prompts))
    for ids, (ours, stats), theirs in zip(prompts, results, wanted, strict=True):
        check_same(placed, {"input_ids": ids}, ours, theirs)
        if fast:
            check_path(stats, device)


def test_threads_with_a_model_each(device):
    """Graphs of several models are captured and replayed simultaneously."""
    models = [tr.accelerate(tiny.llama(seed=seed).to(device), "recycling", fast=True) for seed in range(3)]
    prompts = [tiny.prompt(seed, 7).to(device) for seed in range(3)]

    def decode(index):
        return [models[index].generate(prompts[index], max_new_tokens=32, do_sample=False) for _ in range(4)]

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(decode, range(3)))
    for model, ids, texts in zip(models, prompts, results, strict=True):
        check_path(model.acceleration.stats, device)
        tr.decelerate(model)
        wanted = model.generate(ids, max_new_tokens=32, do_sample=False)
        for text in texts:
            check_same(model, {"input_ids": ids}, text, wanted)


@pytest.mark.parametrize("backend", [Backend(True), EAGER], ids=["captured", "eager"])
def test_requests_that_share_a_running_batch(placed, device, backend):
    """As in the server; each request has its own seed."""
    calls = [
        {
            "input_ids": tiny.prompt(seed, 1 + 3 * seed).to(device),
            "max_new_tokens": 8 + seed,
            **({"do_sample": True, "temperature": 0.8} if seed % 3 == 2 else {"do_sample": False}),
        }
        for seed in range(10)
    ]
    wanted = [tiny.seeded(placed.generate, seed=seed, **call)[0] for seed, call in enumerate(calls)]
    together, drafter = DecodingThread(placed, backend), tr.make_drafter("recycling")
    try:
        with ThreadPoolExecutor(5) as pool:
            ours = list(pool.map(lambda seed: together.model(drafter, seed).generate(**calls[seed]), range(len(calls))))
    finally:
        together.close()
    for call, text, theirs in zip(calls, ours, wanted, strict=True):
        if call["do_sample"]:
            assert text.shape == theirs.shape
        else:
            check_same(placed, call, text, theirs)
