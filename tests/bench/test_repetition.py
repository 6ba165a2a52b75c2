"""Loops in an output, computed by hand."""

import pytest

from token_recycling.bench.store import in_loops, looping, repeated_4grams

LOOP = [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("tokens", "text", "loop"),
    [
        ([1, 2, 3, *[7, 8, 9, 5] * 4, 4], 7, 12),  # from its second repetition on
        ([1, *[5] * 11, 2], 13, 0),
        ([1, *[5] * 12, 2], 2, 11),  # one token, repeated at least twelve times
        ([*LOOP * 2, 9], 13, 0),
        (LOOP * 3, 6, 12),  # three repetitions are a loop, two are not
        ([*[1, 2, 3, 4, 5] * 3, 1, 2, 9], 5, 12),  # it may end within a repetition
        ([], 0, 0),
        ([1, 2, 3], 3, 0),
        (list(range(50)), 50, 0),
    ],
)
def test_loops_are_detected(tokens, text, loop):
    assert looping(tokens) == [False] * text + [True] * loop + [False] * (len(tokens) - text - loop)


def test_near_repetition_is_no_loop_but_counts_as_4grams():
    """x 0 y x 1 y x 2 y ...: no 4-gram is repeated; with a longer frame some are."""
    assert not any(looping([token for number in range(10) for token in (100, number, 101)]))
    tokens = [token for number in range(3) for token in (50, 51, 52, 53, 54, number)]
    assert not any(looping(tokens))
    # 15 4-grams; (50 .. 53) and (51 .. 54) occur three times each, so four of them are repeated.
    assert repeated_4grams([tokens]) == pytest.approx(4 / 15)


def test_4grams_are_counted_within_each_output():
    assert repeated_4grams([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert repeated_4grams([[1, 2, 3], []]) is None


def test_step_is_in_a_loop_if_half_of_its_tokens_are():
    """18 tokens, of which the last 12 loop. Steps of 4, 4, 4, 6: two of the second step's tokens are in the loop."""
    tokens = LOOP * 3
    assert in_loops(tokens, [4, 4, 4, 6]) == (14, 3)
    assert in_loops(tokens, [5, 4, 9]) == (13, 2)
    assert in_loops(tokens, [4, 5, 9]) == (14, 2)
    assert in_loops([1, 2, 3], [1, 2]) == (0, 0)
