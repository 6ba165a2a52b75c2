"""Lookahead: the published mask, a window of three steps worked by hand, the pool, and sampling."""

import pytest
import torch

import token_recycling as tr
from token_recycling.drafters.lookahead import Pool, Window
from token_recycling.trees.draft import DraftBuilder


def published_mask(columns, levels, guesses, size):
    """Figure 2 of the paper, and the positions: the root and the window by level and column, then the guesses.

    A cell of level l and column i sees level 0 up to column i, and column i of the levels 1 to l. A guess sees the root
    and itself, in order.
    """
    n = columns * levels + guesses * size
    mask, positions = torch.zeros(n, n, dtype=torch.bool), torch.zeros(n, dtype=torch.long)
    for level in range(levels):
        for column in range(columns):
            row = level * columns + column
            mask[row, : column + 1] = True
            mask[row, [above * columns + column for above in range(1, level + 1)]] = True
            positions[row] = column + level
    for guess in range(guesses):
        for place in range(size):
            first = columns * levels + guess * size
            mask[first + place, 0] = True
            mask[first + place, first : first + place + 1] = True
            positions[first + place] = place + 1
    return mask, positions


@pytest.mark.parametrize(("columns", "size", "guesses"), [(7, 5, 7), (4, 3, 0), (1, 2, 2), (2, 6, 1)])
def test_the_tree_is_the_published_mask(columns, size, guesses):
    """With a different token in every cell nothing is merged, and each cell is found by its token."""
    window = Window(size, range(columns + size - 3))
    token = 1000
    window.levels = [[token + columns * level + column for column in range(columns)] for level in range(size - 1)]
    grams = [tuple(2000 + (size - 1) * guess + place for place in range(size - 1)) for guess in range(guesses)]
    grown = DraftBuilder(token)
    window.plant(grown, grams)
    shape = grown.draft().tree.on(torch.device("cpu"))
    mask, positions = published_mask(columns, size - 1, guesses, size - 1)
    assert len(grown.parents) == len(mask)
    by_token = torch.tensor(grown.tokens).argsort()
    assert torch.equal(shape.ancestors[by_token][:, by_token], mask)
    assert torch.equal(shape.depths[by_token], positions)


def test_a_window_of_three_steps_and_what_it_put_in_the_pool(counting):
    """W = 2, N = 3, the counting model of 16 tokens, the prompt 3: level 0 is the root and 3 3.

    | step | root | level 0 | level 1 | the model says | n-grams      |
    |------|------|---------|---------|----------------|--------------|
    | 1    | 3    | 3 3 3   |         | 4 4 4          |              |
    | 2    | 4    | 4 3     | 4 4     | 5 5            | 4 4 5, 3 4 5 |
    | 3    | 5    | 5 4     | 5 5     | 6 6            | 5 5 6, 4 5 6 |

    Level 0 is one column longer in step 1, since the window moves on by a column before level 1 is there; column 0 of
    level 0 is always the root.
    """
    options = {"window": 2, "ngram_size": 3, "guesses": 2, "max_new_tokens": 24}
    steps = list(tr.stream(counting, torch.tensor([3]), "lookahead", **options))
    drafted = [(step.draft.tokens.tolist(), step.draft.tree.parents) for step in steps[:3]]
    assert drafted[0] == ([3, 3, 3], (-1, 0, 1))
    # 3 is column 1 of level 0; the first 4 is column 0 of level 1, the second, below 3, column 1.
    assert drafted[1] == ([4, 3, 4, 4], (-1, 0, 0, 1))
    assert drafted[2] == ([5, 4, 5, 5], (-1, 0, 0, 1))
    assert [step.tokens for step in steps[:3]] == [[4], [5], [6]]
    # The text goes on 4 5 ... 15 0 1 2 3: then 3 4 5 is in the pool since step 2.
    (again,) = [step for step in steps[1:] if step.draft.tokens[0] == 3]
    assert [again.draft.tokens[node] for node in again.accepted] == [3, 4, 5]
    assert again.tokens == [4, 5, 6]


def test_a_full_place_in_the_pool_loses_what_was_seen_longest_ago():
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


def test_the_pool_can_learn_the_prompt_and_the_text(counting):
    """The prompt says what follows 0; what was emitted after it is learned in turn, and found a round later."""
    ids = torch.tensor([0, 1, 2, 0])
    options = {"window": 1, "ngram_size": 3, "guesses": 1, "max_new_tokens": 24}
    without = list(tr.stream(counting, ids, "lookahead", **options))
    assert len(without[0].tokens) == 1
    learned = list(tr.stream(counting, ids, "lookahead", pool_from_prompt=True, **options))
    assert learned[0].tokens == [1, 2, 3]
    second_round = [step.tokens for step in learned if step.draft.tokens[0] == 3]
    assert second_round[-1] == [4, 5, 6]
