"""The suffix automaton against a search of the whole text, and on texts whose matches can be seen."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from token_recycling.candidates.suffix_automaton import NO_MATCH, SuffixAutomaton

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
    assert SuffixAutomaton(text).match.length == longest_repeated_suffix(text, [])


@given(TEXTS, st.lists(st.integers(0, 2), max_size=6))
def test_a_path_that_is_only_thought_of_is_matched_in_the_same_way(text: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    match = automaton.match
    for place, token in enumerate(path, start=1):
        match = automaton.advance(match, token)
        assert match.length == longest_repeated_suffix(text, path[:place])
    assert automaton.arrays.tokens[: len(text)].tolist() == text


@given(TEXTS, st.lists(st.integers(0, 2), max_size=6))
def test_what_followed_stands_after_a_place_of_the_match(text: list[int], path: list[int]) -> None:
    automaton = SuffixAutomaton(text)
    match = automaton.match
    for token in path:
        match = automaton.advance(match, token)
    found = automaton.following(match)
    whole = text + path
    suffix = whole[len(whole) - match.length :]
    followed = {
        text[place + match.length]
        for place in range(len(text) - match.length)
        if text[place : place + match.length] == suffix
    }
    assert found in followed if followed and match.length else True
    assert found is not None or not followed or match == NO_MATCH


def test_what_followed_the_last_time_comes_first() -> None:
    """After 1 2 stood 3, and later 4, once the match was seen again."""
    automaton = SuffixAutomaton([1, 2, 3, 1, 2])
    assert automaton.match.length == 2
    assert automaton.following(automaton.match) == 3
    automaton.extend([4, 1, 2])
    assert automaton.following(automaton.match) == 4


def test_a_loop_is_followed_beyond_its_end() -> None:
    automaton = SuffixAutomaton([1, 2, 3, 1, 2, 3])
    match, drafted = automaton.match, []
    for _ in range(7):
        token = automaton.following(match)
        assert token is not None
        drafted.append(token)
        match = automaton.advance(match, token)
    assert drafted == [1, 2, 3, 1, 2, 3, 1]
    assert automaton.branch(automaton.match, 7).tolist() == drafted


def test_a_text_without_repetition_has_no_match() -> None:
    automaton = SuffixAutomaton([5, 6, 7])
    assert automaton.match == NO_MATCH
    assert automaton.following(automaton.match) is None
    assert automaton.branch(automaton.match, 3).tolist() == []
    assert SuffixAutomaton().following(NO_MATCH) is None
