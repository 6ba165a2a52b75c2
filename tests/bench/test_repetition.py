"""Loops in an output, by hand."""

import pytest

from token_recycling.bench.run.repetition import in_loops, looping, repeated_4grams


def test_a_stretch_loops_from_its_second_round_on():
    """1 2 3 | 7 8 9 5, then three rounds more of 7 8 9 5, then 4."""
    tokens = [1, 2, 3] + [7, 8, 9, 5] * 4 + [4]
    assert looping(tokens) == [False] * 7 + [True] * 12 + [False]


def test_one_token_again_and_again_is_a_loop_from_twelve_on():
    assert not any(looping([1] + [5] * 11 + [2]))
    assert looping([1] + [5] * 12 + [2]) == [False] * 2 + [True] * 11 + [False]


def test_two_rounds_are_none_and_three_are():
    unit = [1, 2, 3, 4, 5, 6]
    assert not any(looping(unit * 2 + [9]))
    assert looping(unit * 3) == [False] * 6 + [True] * 12


def test_a_loop_may_end_in_the_middle_of_a_round():
    assert looping([1, 2, 3, 4, 5] * 3 + [1, 2, 9]) == [False] * 5 + [True] * 12 + [False]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], list(range(50))])
def test_what_does_not_repeat_is_no_loop(tokens):
    assert looping(tokens) == [False] * len(tokens)


def test_near_repetition_is_no_loop_but_counts_as_4grams():
    """x 0 y x 1 y x 2 y ...: no 4-gram comes twice; with a longer frame they do."""
    assert not any(looping([token for number in range(10) for token in (100, number, 101)]))
    tokens = [token for number in range(3) for token in (50, 51, 52, 53, 54, number)]
    assert not any(looping(tokens))
    # 15 4-grams; (50 .. 53) and (51 .. 54) come three times each, so that four of them stood before.
    assert repeated_4grams([tokens]) == pytest.approx(4 / 15)


def test_4grams_are_counted_within_each_output():
    assert repeated_4grams([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert repeated_4grams([[1, 1, 1, 1, 1, 1]]) == pytest.approx(2 / 3)
    assert repeated_4grams([[1, 2, 3], []]) is None


def test_a_step_lies_in_a_loop_if_half_of_its_tokens_do():
    """18 tokens, of which the last 12 loop. Steps of 4, 4, 4, 6: the second has 2 of its 4 there."""
    tokens = [1, 2, 3, 4, 5, 6] * 3
    assert in_loops(tokens, [4, 4, 4, 6]) == (14, 3)
    assert in_loops(tokens, [5, 4, 9]) == (13, 2)
    assert in_loops(tokens, [3, 6, 9]) == (15, 2)
    assert in_loops(tokens, [4, 5, 9]) == (14, 2)
    assert in_loops(tokens, [9, 9]) == (9, 1)
    assert in_loops([1, 2, 3], [1, 2]) == (0, 0)
