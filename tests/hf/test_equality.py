"""The output is that of `model.generate`: many prompts, every tree and rule, cold and hot, on random models."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from support import tiny

import token_recycling as tr
from token_recycling.model.tree_model import TreeModel

pytestmark = pytest.mark.core

TREES: list[Any] = ["paper", "static:8", "chain:4", "static:30", "0 1 2 3 00 01 10 000 0000", "2 1 0 02 00 20 001"]
RULES = ["last", "first", "unordered"]
PROMPTS, NEW = 40, 16


MODELS = {
    "64 tokens": lambda: tiny.llama(0),
    "97 tokens": lambda: tiny.llama(1, context=1, vocab_size=97, num_key_value_heads=1),
    "200 tokens, tied": lambda: tiny.llama(2, vocab_size=200, tie_word_embeddings=True, initializer_range=0.4),
    "eager": lambda: tiny.llama(3, vocab_size=128, attn_implementation="eager"),
}
LLAMAS = list(MODELS)


@cache
def model_named(name):
    torch.manual_seed(5)
    return MODELS[name]().eval()


@cache
def references(name):
    """Prompts of 1 to 40 tokens and what `model.generate` makes of them."""
    model = model_named(name)
    prompts = [tiny.prompt(seed, 1 + seed, model.config.vocab_size) for seed in range(PROMPTS)]
    return [(ids, model.generate(ids, max_new_tokens=NEW)) for ids in prompts]


def test_the_random_models_say_varied_things():
    for name in LLAMAS:
        said = torch.cat([text[0, ids.shape[1] :] for ids, text in references(name)])
        assert len(said.unique()) > 20
        assert len({tuple(text[0, ids.shape[1] :].tolist()) for ids, text in references(name)}) > PROMPTS / 2


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", LLAMAS)
def test_hot_decoding_equals_generate(name, tree):
    """One matrix for all prompts of a model, twice: the second time it has seen every text."""
    rule = RULES[(LLAMAS.index(name) + TREES.index(tree)) % 3]
    drafter = tr.make_drafter("published", tree=tree, update=rule)
    first, second = tr.Stats(), tr.Stats()
    for stats, prompts in ((first, references(name)), (second, references(name)[:10])):
        for ids, wanted in prompts:
            ours = tr.generate(model_named(name), ids, drafter=drafter, stats=stats, max_new_tokens=NEW)
            assert torch.equal(ours, wanted)
    assert first.tokens == PROMPTS * NEW
    assert second.mat > 1.1


@pytest.mark.parametrize("k", [1, 3, 16])
def test_other_numbers_of_candidates_equal_generate(k):
    drafter = tr.make_drafter("published", k=k, tree="0 00 000 0000")
    for ids, wanted in references("64 tokens")[:10]:
        assert torch.equal(tr.generate(model_named("64 tokens"), ids, drafter=drafter, max_new_tokens=NEW), wanted)
    assert drafter.matrix.candidates.shape == (64, k)


@pytest.mark.parametrize("piece", [16, 29, 30, 31, 40])
def test_a_first_draft_of_more_nodes_than_are_read_at_once(piece, monkeypatch):
    monkeypatch.setattr("token_recycling.model.prefill.PIECE", piece)
    for ids, wanted in references("64 tokens")[:4]:
        drafter = tr.make_drafter("published", tree="static:30")
        assert torch.equal(tr.generate(model_named("64 tokens"), ids, drafter=drafter, max_new_tokens=NEW), wanted)


def test_a_matrix_of_lies_costs_speed_but_not_tokens():
    drafter = tr.make_drafter("published", tree="paper")
    matrix = drafter.prepare(TreeModel(model_named("64 tokens")))
    drafter.observe = lambda step: None
    for seed, (ids, wanted) in enumerate(references("64 tokens")[:10]):
        matrix.candidates.copy_(torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(seed)))
        assert torch.equal(tr.generate(model_named("64 tokens"), ids, drafter=drafter, max_new_tokens=NEW), wanted)


CODE = [
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "for i in range(10):\n    if i % 2 == 0:\n        print(i)\n    else:\n",
    "def test_add():\n    assert add(1, 2) == 3\n    assert add(",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "with open(path, encoding='utf-8') as file:\n    lines = ",
    "x = {'a': 1, 'b': 2}\nfor key, value in x.items():\n",
    "#",
]


@pytest.mark.parametrize("spec", ["recycling", "recycling:tree=80", "published"])
def test_the_shipped_model_completes_code_as_generate_does(shipped, spec):
    model, tokenizer = shipped
    drafter, stats = tr.make_drafter(spec), tr.Stats()
    for text in CODE:
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = _completed(model, text, ids)
        assert torch.equal(tr.generate(model, ids, drafter=drafter, stats=stats, max_new_tokens=64), wanted)
    assert stats.mat > 1.5


_COMPLETED: dict[str, torch.Tensor] = {}


def _completed(model, text, ids):
    if text not in _COMPLETED:
        _COMPLETED[text] = model.generate(ids, max_new_tokens=64)
    return _COMPLETED[text]
