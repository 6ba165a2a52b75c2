"""The suffix automaton against a search of the whole text, and on texts whose matches can be seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from token_recycling.recycling.suffix_automaton import SuffixAutomaton, advance, following

TEXTS = st.lists(st.integers(0, 2), max_size=40)


def longest_repeated_suffix(text: list[int], path: list[int]) -> int:
    """Length of the longest suffix of text + path that stands in the text, and not only at the very end of it."""
    whole = text + path
    for length in range(len(whole), 0, -1):
        suffix = whole[len(whole) - length :]
        last = len(text) - length - (0 if path else 1)
        if any(text[place : place + length] == suffix for place in range(last + 1)):
            return length
    return 0


@given(TEXTS)
def test_the_match_is_the_longest_suffix_that_stood_there_before(text: list[int]) -> None:
    assert SuffixAutomaton(text).match[1] == longest_repeated_suffix(text, [])


@given(TEXTS, st.lists(st.integers(0, 2), max_size=6))
def test_a_hypothetical_path_is_matched_in_the_same_way(text: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    match = automaton.match
    for place, token in enumerate(path, start=1):
        match = advance(automaton.arrays, *match, token)
        assert match[1] == longest_repeated_suffix(text, path[:place])
    assert automaton.arrays.tokens[: len(text)].tolist() == text


@given(TEXTS, st.lists(st.integers(0, 2), max_size=6))
def test_what_followed_stands_after_a_place_of_the_match(text: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    match = automaton.match
    for token in path:
        match = advance(automaton.arrays, *match, token)
    found = following(automaton.arrays, match[0])
    whole = text + path
    suffix = whole[len(whole) - match[1] :]
    followed = {
        text[place + match[1]] for place in range(len(text) - match[1]) if text[place : place + match[1]] == suffix
    }
    assert found in followed if followed and match[1] else True
    assert found >= 0 or not followed or match == (0, 0)


def test_what_followed_the_last_time_comes_first() -> None:
    """After 1 2 stood 3, and later 4, once the match was seen again."""
    automaton = SuffixAutomaton([1, 2, 3, 1, 2])
    assert automaton.match[1] == 2
    assert following(automaton.arrays, automaton.match[0]) == 3
    automaton.extend([4, 1, 2])
    assert following(automaton.arrays, automaton.match[0]) == 4


def test_a_loop_is_followed_beyond_its_end() -> None:
    automaton = SuffixAutomaton([1, 2, 3, 1, 2, 3])
    match, drafted = automaton.match, []
    for _ in range(7):
        token = following(automaton.arrays, match[0])
        assert token >= 0
        drafted.append(token)
        match = advance(automaton.arrays, *match, token)
    assert drafted == [1, 2, 3, 1, 2, 3, 1]
    assert automaton.branch(7).tolist() == drafted


def test_a_text_without_repetition_has_no_match() -> None:
    automaton = SuffixAutomaton([5, 6, 7])
    assert automaton.match == (0, 0)
    assert following(automaton.arrays, automaton.match[0]) < 0
    assert automaton.branch(3).tolist() == []
    assert following(SuffixAutomaton().arrays, 0) < 0
