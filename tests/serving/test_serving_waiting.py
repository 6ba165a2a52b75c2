"""Long prompts block no other request: short ones run next to them, and a disconnect stops the prefill."""

import asyncio
import contextlib
import copy
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from support import architectures, tiny
from support.noting import own
from support.recurrent_architectures import RECURRENT
from support.serving import serving, wait_for
from support.speaking import ascii_llama

from token_recycling.model.prepacking import prepack
from token_recycling.serving import batch_slots, create_app
from token_recycling.serving.errors import CancelledError, add_error_handlers

PIECES = 8
LONG = "import os\n" * 1200
ASKED = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def slow_prefill():
    """A model that is slow in prefill, and the token counts of its prefill passes."""
    model, passes = ascii_llama(), []

    def slow(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 64:
            passes.append(kwargs["input_ids"].shape[1])
            time.sleep(0.05)

    model.register_forward_pre_hook(own(slow), with_kwargs=True)
    return model, passes


@pytest.fixture(scope="module")
def answer(slow_prefill):
    """The output of transformers after the long prompt."""
    ids = tiny.tokenizer()(LONG, return_tensors="pt")["input_ids"]
    text = slow_prefill[0].generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return tiny.tokenizer().decode(text[0, ids.shape[1] :])


@contextlib.contextmanager
def pending(server, **body):
    """Send a request; disconnect at the end of the block, answered or not."""
    content = json.dumps({**ASKED, **body}).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + content)
        yield


def disconnect_during_prefill(server, passes):
    """Send a long prompt and disconnect while it is being read."""
    passes.clear()
    with pending(server, prompt=LONG):
        wait_for(lambda: passes)


@pytest.mark.parametrize(("concurrency", "drafter"), [(1, "published"), (2, "recycling:tree=8")])
def test_disconnect_during_prefill_stops_it(slow_prefill, answer, concurrency, drafter):
    model, passes = slow_prefill
    with serving(model, tiny.tokenizer(), concurrency=concurrency, drafter=drafter) as server:
        disconnect_during_prefill(server, passes)
        server.wait_until_idle()
        assert 0 < len(passes) < PIECES
        assert server.metrics()['token_recycling_generations_total{outcome="cancelled"}'] == 1
        again = server.complete(prompt=LONG, **ASKED)
        kept = again.usage.prompt_tokens_details.cached_tokens
        assert 0 < kept < again.usage.prompt_tokens - 300, "tokens that were read are cached"
    assert again.choices[0].text == answer


@pytest.mark.parametrize("stream", [False, True])
def test_queued_request_of_a_disconnected_client_is_dropped(slow_prefill, stream):
    model, passes = slow_prefill
    with serving(model, tiny.tokenizer(), concurrency=1) as server, ThreadPoolExecutor(1) as pool:
        passes.clear()
        first = pool.submit(server.complete, prompt=LONG, **ASKED)
        wait_for(lambda: passes)
        with pending(server, prompt="# another\n" + LONG, stream=stream, n=2):
            wait_for(lambda: server.engine.workers.waiting == 2)
            assert not first.done()
        assert sum(passes) <= first.result().usage.prompt_tokens, "only the first prompt is read"
        server.wait_until_idle()
        metrics = server.metrics()
        outcomes = [
            metrics[f'token_recycling_generations_total{{outcome="{one}"}}'] for one in ("cancelled", "complete")
        ]
        assert outcomes == [1, 1]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_timeout_applies_during_prefill(slow_prefill, concurrency):
    model, passes = slow_prefill
    passes.clear()
    with serving(model, tiny.tokenizer(), concurrency=concurrency, timeout=0.3) as server:
        assert server.post("/v1/completions", {"prompt": LONG, **ASKED}).status_code == 504
        assert len(passes) < PIECES


def test_short_request_finishes_during_a_long_prefill(slow_prefill):
    """With the default settings: four batch slots."""
    model, passes = slow_prefill
    with serving(model, tiny.tokenizer()) as server, ThreadPoolExecutor(1) as pool:
        alone = server.complete(prompt="for index in", **ASKED).choices[0].text
        passes.clear()
        long = pool.submit(server.complete, prompt=LONG, **ASKED)
        wait_for(lambda: len(passes) > 2)
        short = server.complete(prompt="for index in", **ASKED)
        assert len(passes) < PIECES
        assert not long.done()
        assert short.choices[0].text == alone
        assert long.result().usage.completion_tokens == 4
        assert len(passes) >= PIECES


# Number of batch slots


def build(model, tokenizer=None, **settings):
    return create_app(model, tokenizer or tiny.tokenizer(), **settings).state.engine


@pytest.mark.parametrize("packed", [False, True])
def test_batch_slots_fit_in_memory(model, monkeypatch, packed):
    """Next to the weights, and their prepacked copy."""
    model = copy.deepcopy(model)
    with contextlib.closing(build(model)) as engine:
        assert engine.slots.size == 4
    weights = sum(weight.nbytes for weight in model.parameters())
    weights += prepack(model, True, fixed=True).nbytes if packed else 0
    slot = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    sequence = (4096 + 4096 // 8) * slot  # with slots to spare
    needed = weights + 2 * sequence
    three = needed + sequence
    fits = [(three + 9, 0, 3), (three - 9, 0, 2), (needed + 9, 0, 2), (needed - 9, 0, 1), (needed + 9, 1, 1)]
    for memory, cache, texts in ((8 / 7 * held, kept, texts) for held, kept, texts in fits):
        monkeypatch.setattr(batch_slots, "memory", lambda device, held=int(memory): held)
        with contextlib.closing(build(model, cache=cache)) as engine:
            assert engine.slots.size == texts
            assert (engine.batch is None) == (texts == 1)
    for given in (1, 3):
        with contextlib.closing(build(model, cache=0, concurrency=given)) as engine:
            assert engine.slots.size == given


@pytest.mark.parametrize("case", [case for case in RECURRENT if case.family in ("mamba", "falcon_h1")], ids=str)
def test_batch_slots_include_recurrent_states(case, monkeypatch):
    model = architectures.model_of(case)
    sizes = []
    for held in (10**9, 1000):
        monkeypatch.setattr(batch_slots, "memory", lambda device, held=held: held)
        model.config.max_position_embeddings = None if case.family == "mamba" else 256
        with contextlib.closing(build(model, cache=0)) as engine:
            sizes.append(engine.slots.size)
    assert sizes == [4, 1]


def test_single_batch_slot_states_its_reason(model, monkeypatch):
    bordered = architectures.model_of(architectures.named("llama", "dynamic rotary scaling from 32"))
    with contextlib.closing(build(bordered)) as engine:
        assert str(engine.slots).startswith("1 batch slot: requests cannot be batched: ")
    with contextlib.closing(build(model, drafter="layer_skip:sampled=true")) as engine:
        assert "seeds would not hold" in str(engine.slots)
    with monkeypatch.context() as patch:
        patch.setitem(vars(model.config), "max_position_embeddings", None)
        with contextlib.closing(build(model, max_new_tokens=9)) as engine:
            assert "context length is unknown" in str(engine.slots)
    # transformers' own loop samples from the global generator, so seeds would not hold.
    monkeypatch.setattr(model.generation_config, "prompt_lookup_num_tokens", 3)
    with (
        contextlib.closing(build(model, concurrency=2)) as engine,
        pytest.raises(RuntimeError, match="prompt lookup"),
    ):
        asyncio.run(engine.warm_up())
    with serving(model, tiny.tokenizer()) as server:
        assert "assisted generation" in str(server.engine.slots)
        assert server.complete().usage.completion_tokens == 8


def test_cancelled_request_is_not_a_server_error():
    """For example while its schema is compiled; an unhandled error would be logged with a traceback."""
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/")
    def gone():
        raise CancelledError

    assert TestClient(app).get("/").status_code == 499
