"""The output is that of `model.generate`: of a trained model, and at the edge of what is read at once.

Random calls of random models are in test_fuzzing.py.
"""

from __future__ import annotations

import pytest
import torch
from support import tiny
from support.cases import thinned

import token_recycling as tr

pytestmark = pytest.mark.core


@pytest.mark.parametrize("piece", [29, 30, 31])
def test_a_first_draft_of_as_many_nodes_as_are_read_at_once(model, piece, monkeypatch):
    for module in ("prefill", "runner"):
        monkeypatch.setattr(f"token_recycling.model.{module}.PIECE", piece)
    for length in (1, 13, 25):
        ids, drafter = tiny.prompt(length, length), tr.make_drafter("published", tree="static:30")
        wanted = model.generate(ids, max_new_tokens=16)
        assert torch.equal(tr.generate(model, ids, drafter=drafter, max_new_tokens=16), wanted)


CODE = [
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "#",
]


@pytest.mark.parametrize("spec", thinned(["recycling", "recycling:tree=80", "published"]))
def test_the_shipped_model_completes_code_as_generate_does(shipped, spec):
    model, tokenizer = shipped
    drafter, stats = tr.make_drafter(spec), tr.Stats()
    for text in CODE:
        ids = tokenizer(text, return_tensors="pt").input_ids
        wanted = model.generate(ids, max_new_tokens=32)
        assert torch.equal(tr.generate(model, ids, drafter=drafter, stats=stats, max_new_tokens=32), wanted)
    assert stats.mat > 1.5
