"""Nobody waits for the rest of a long prompt: no short text beside it, and none that comes after its client left."""

import asyncio
import contextlib
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
from support.speaking import speaking_llama

from token_recycling.serving import batch_slots, create_app
from token_recycling.serving.errors import CancelledError, add_error_handlers

PIECES = 8
LONG = "import os\n" * 1200
ASKED = {"max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def reading():
    """A model whose pieces of a prompt take a while, and how many tokens each pass over several had."""
    model, passes = speaking_llama(), []

    def slow(module, args, kwargs):
        if kwargs["input_ids"].shape[1] > 64:
            passes.append(kwargs["input_ids"].shape[1])
            time.sleep(0.05)

    model.register_forward_pre_hook(own(slow), with_kwargs=True)
    return model, passes


@pytest.fixture(scope="module")
def answer(reading):
    """What transformers says after the long prompt."""
    ids = tiny.tokenizer()(LONG, return_tensors="pt")["input_ids"]
    text = reading[0].generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return tiny.tokenizer().decode(text[0, ids.shape[1] :])


@contextlib.contextmanager
def asking(server, **body):
    """A client that goes away at the end of the block, answered or not."""
    content = json.dumps({**ASKED, **body}).encode()
    headers = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n".encode() + content)
        yield


def leave(server, passes):
    """Asks for a long prompt, and goes away while it is being read."""
    passes.clear()
    with asking(server, prompt=LONG):
        wait_for(lambda: passes)


@pytest.mark.parametrize(("concurrency", "drafter"), [(1, "published"), (2, "recycling:tree=8")])
def test_a_client_that_leaves_while_its_prompt_is_read_frees_the_machine(reading, answer, concurrency, drafter):
    model, passes = reading
    with serving(model, tiny.tokenizer(), concurrency=concurrency, drafter=drafter) as server:
        leave(server, passes)
        server.wait_until_idle()
        assert 0 < len(passes) < PIECES
        assert server.metrics()['token_recycling_generations_total{outcome="cancelled"}'] == 1
        again = server.complete(prompt=LONG, **ASKED)
        kept = again.usage.prompt_tokens_details.cached_tokens
        assert 0 < kept < again.usage.prompt_tokens - 300, "what was read before is not read again"
    assert again.choices[0].text == answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_never_answered(reading, stream):
    model, passes = reading
    with serving(model, tiny.tokenizer(), concurrency=1) as server, ThreadPoolExecutor(1) as pool:
        passes.clear()
        first = pool.submit(server.complete, prompt=LONG, **ASKED)
        wait_for(lambda: passes)
        with asking(server, prompt="# another\n" + LONG, stream=stream, n=2):
            wait_for(lambda: server.engine.workers.waiting == 2)
            assert not first.done()
        assert sum(passes) <= first.result().usage.prompt_tokens, "of the first prompt alone"
        server.wait_until_idle()
        metrics = server.metrics()
        outcomes = [
            metrics[f'token_recycling_generations_total{{outcome="{one}"}}'] for one in ("cancelled", "complete")
        ]
        assert outcomes == [1, 1]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_deadline_holds_while_a_prompt_is_read(reading, concurrency):
    model, passes = reading
    passes.clear()
    with serving(model, tiny.tokenizer(), concurrency=concurrency, timeout=0.3) as server:
        assert server.post("/v1/completions", {"prompt": LONG, **ASKED}).status_code == 504
        assert len(passes) < PIECES


def test_a_short_text_is_said_while_a_long_prompt_is_read(reading):
    """With the server's own settings: four texts at once."""
    model, passes = reading
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


# How many texts are generated at once


def stated(model, tokenizer=None, **settings):
    return create_app(model, tokenizer or tiny.tokenizer(), **settings).state.engine


def test_as_many_texts_are_generated_at_once_as_fit_in_memory(model, monkeypatch):
    with contextlib.closing(stated(model)) as engine:
        assert engine.slots.size == 4
    weights = sum(weight.nbytes for weight in model.parameters())
    slot = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, size, bytes
    sequence = (4096 + 4096 // 8) * slot  # with slots to spare
    needed = weights + 2 * sequence
    three = needed + sequence
    fits = [(three + 9, 0, 3), (three - 9, 0, 2), (needed + 9, 0, 2), (needed - 9, 0, 1), (needed + 9, 1, 1)]
    for memory, cache, texts in ((8 / 7 * held, kept, texts) for held, kept, texts in fits):
        monkeypatch.setattr(batch_slots, "memory", lambda device, held=int(memory): held)
        with contextlib.closing(stated(model, cache=cache)) as engine:
            assert engine.slots.size == texts
            assert (engine.batch is None) == (texts == 1)
    for given in (1, 3):
        with contextlib.closing(stated(model, cache=0, concurrency=given)) as engine:
            assert engine.slots.size == given


@pytest.mark.parametrize("case", [case for case in RECURRENT if case.family in ("mamba", "falcon_h1")], ids=str)
def test_states_of_texts_take_memory_too(case, monkeypatch):
    model = architectures.model_of(case)
    sizes = []
    for held in (10**9, 1000):
        monkeypatch.setattr(batch_slots, "memory", lambda device, held=held: held)
        model.config.max_position_embeddings = None if case.family == "mamba" else 256
        with contextlib.closing(stated(model, cache=0)) as engine:
            sizes.append(engine.slots.size)
    assert sizes == [4, 1]


def test_other_texts_are_generated_one_at_a_time_and_why_is_said(model, monkeypatch):
    bordered = architectures.model_of(architectures.named("llama", "dynamic rotary scaling from 32"))
    with contextlib.closing(stated(bordered)) as engine:
        assert str(engine.slots).startswith("1 batch slot: requests cannot be batched: ")
    with contextlib.closing(stated(model, drafter="layer_skip:sampled=true")) as engine:
        assert "seeds would not hold" in str(engine.slots)
    with monkeypatch.context() as patch:
        patch.setitem(vars(model.config), "max_position_embeddings", None)
        with contextlib.closing(stated(model, max_new_tokens=9)) as engine:
            assert "context length is unknown" in str(engine.slots)
    # transformers' own draws from the generator of the whole process: no seed would hold.
    monkeypatch.setattr(model.generation_config, "prompt_lookup_num_tokens", 3)
    with contextlib.closing(stated(model, concurrency=2)) as engine, pytest.raises(RuntimeError, match="prompt lookup"):
        asyncio.run(engine.warm_up())
    with serving(model, tiny.tokenizer()) as server:
        assert "assisted generation" in str(server.engine.slots)
        assert server.complete().usage.completion_tokens == 8


def test_a_client_that_left_is_no_failure():
    """As one does while its schema is compiled: an error that nobody handles would be logged with its traceback."""
    app = FastAPI()
    add_error_handlers(app)

    @app.get("/")
    def gone():
        raise CancelledError

    assert TestClient(app).get("/").status_code == 499
