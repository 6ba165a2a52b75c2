"""Lookahead: three steps of the window computed by hand, and the pool."""

import torch

import token_recycling as tr
from token_recycling.drafters.lookahead import Pool


def test_three_steps_of_the_window_and_their_ngrams(counting):
    """W = 2, N = 3, the counting model of 16 tokens, the prompt 3: level 0 is the root and 3 3.

    | step | root | level 0 | level 1 | model output   | n-grams      |
    |------|------|---------|---------|----------------|--------------|
    | 1    | 3    | 3 3 3   |         | 4 4 4          |              |
    | 2    | 4    | 4 3     | 4 4     | 5 5            | 4 4 5, 3 4 5 |
    | 3    | 5    | 5 4     | 5 5     | 6 6            | 5 5 6, 4 5 6 |

    Level 0 is one column longer in step 1, since the window moves by a column before level 1 exists; column 0 of level
    0 is always the root.
    """
    options = {"window": 2, "ngram_size": 3, "guesses": 2, "max_new_tokens": 24}
    steps = list(tr.stream(counting, torch.tensor([3]), "lookahead", **options))
    drafted = [(step.draft.tokens.tolist(), step.draft.parents.tolist()) for step in steps[:3]]
    assert drafted[0] == ([3, 3, 3], [-1, 0, 1])
    # 3 is column 1 of level 0; the first 4 is column 0 of level 1, the second, below 3, column 1.
    assert drafted[1] == ([4, 3, 4, 4], [-1, 0, 0, 1])
    assert drafted[2] == ([5, 4, 5, 5], [-1, 0, 0, 1])
    assert [step.tokens for step in steps[:3]] == [[4], [5], [6]]
    assert [step.draft.needed for step in steps[:3]] == [{0, 1, 2}, {2, 3}, {2, 3}], "the newest level"
    # The sequence continues 4 5 ... 15 0 1 2 3: 3 4 5 has been in the pool since step 2.
    (again,) = [step for step in steps[1:] if step.draft.tokens[0] == 3]
    assert [again.draft.tokens[node] for node in again.accepted] == [3, 4, 5]
    assert again.tokens == [4, 5, 6]


def test_pool_evicts_the_least_recently_seen_ngram():
    pool = Pool(2)
    pool.add((1, 10, 11))
    pool.add((1, 20, 21))
    pool.add((2, 5, 5))
    assert pool.guesses(1) == [(20, 21), (10, 11)]
    pool.add((1, 10, 11))
    pool.add((1, 30, 31))
    assert pool.guesses(1) == [(30, 31), (10, 11)]
    assert pool.guesses(2) == [(5, 5)]
    assert pool.guesses(3) == []


def test_pool_can_learn_from_prompt_and_output(counting):
    """The prompt contains a continuation of 0. Emitted tokens are learned too, and found a round later."""
    ids = torch.tensor([0, 1, 2, 0])
    options = {"window": 1, "ngram_size": 3, "guesses": 1, "max_new_tokens": 24}
    without = list(tr.stream(counting, ids, "lookahead", **options))
    assert len(without[0].tokens) == 1
    learned = list(tr.stream(counting, ids, "lookahead", pool_from_prompt=True, **options))
    assert learned[0].tokens == [1, 2, 3]
    second_round = [step.tokens for step in learned if step.draft.tokens[0] == 3]
    assert second_round[-1] == [4, 5, 6]
