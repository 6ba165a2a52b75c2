"""The server's outputs equal those of the real model, one or two at a time, whole and streamed."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.real_prompts import CONVERSATION, QUESTIONS
from support.serving import serving

import token_recycling as tr

pytestmark = pytest.mark.real

ASKED = [kind[0] for kind in QUESTIONS.values()][:4]
NEW = 32


@pytest.fixture(scope="module", params=[1, 2], ids=["one at a time", "two at a time"])
def client(request, real):
    # A separate model: the server accelerates it; the fixture `real` gives the expected outputs.
    model = tr.load(real.model.name_or_path, dtype="float32", device="cpu").model
    with serving(model, real.tokenizer, name="real", drafter="recycling", concurrency=request.param) as server:
        yield server.client().with_options(timeout=300).chat.completions


def ask(client, *turns, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
    return client.create(model="real", messages=messages, temperature=0, max_tokens=NEW, **more)


@pytest.fixture(scope="module")
def expected(real, ids, answer):
    """The answers of `generate`, as text."""
    prompts = {question: ids(question).shape[1] for question in ASKED}
    return [real.tokenizer.decode(answer(q)[0, length:], skip_special_tokens=True) for q, length in prompts.items()]


def test_concurrent_answers(client, expected):
    with ThreadPoolExecutor(len(ASKED)) as threads:
        found = list(threads.map(lambda question: ask(client, question), ASKED))
    assert [each.choices[0].message.content for each in found] == expected
    assert all(each.usage.model_extra["speculation"]["accelerated"] for each in found)


def test_streamed_answer(client, expected):
    with contextlib.closing(ask(client, ASKED[0], stream=True)) as chunks:
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == expected[0]
    assert len(pieces) > 3


def test_conversation(client, real, ids):
    turns = []
    for said in CONVERSATION:
        prompt = ids(*turns, said)
        text = real.model.generate(prompt, max_new_tokens=NEW, do_sample=False)[0, prompt.shape[1] :]
        wanted = real.tokenizer.decode(text, skip_special_tokens=True)
        assert ask(client, *turns, said).choices[0].message.content == wanted
        turns += [said, wanted]
