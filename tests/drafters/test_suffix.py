"""The suffix drafter: what is drafted after texts whose matches can be seen."""

import torch
from support import runs, tiny

import token_recycling as tr
from token_recycling import Context
from token_recycling.model.tree_model import TreeModel


def drafted(text, **options):
    begun = runs.begun(tr.make_drafter("suffix", **options), text[:1], TreeModel(tiny.counting_llama()))
    return begun.draft(Context(torch.tensor(text), 99)).tokens[1:].tolist()


def test_the_longer_the_match_the_longer_the_draft():
    """After 3 stood 4 5 6 7 8 9; then the last 1, 2 or 3 tokens match, and twice as many are drafted."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert drafted([*text, 3]) == [4, 5]
    assert drafted([*text, 2, 3]) == [4, 5, 6, 7]
    assert drafted([*text, 1, 2, 3]) == [4, 5, 6, 7, 8, 9]
    assert drafted([*text, 1, 2, 3], factor=0.5) == [4]
    assert drafted([*text, 1, 2, 3], factor=9, num_tokens=4) == [4, 5, 6, 7]
    assert drafted([*text, 2, 3], min_match=3) == []
    assert drafted([*text, 2, 3], factor=float("inf"), num_tokens=3) == [4, 5, 6]
    assert drafted([*text, 2, 3], factor=5e-324) == [4]
    assert drafted(text) == []
