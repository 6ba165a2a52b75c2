"""Earlier occurrences of tokens, compared with a search of the whole text, and the history of many sequences."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from token_recycling.recycling import suffix_index as module
from token_recycling.recycling.calibration import MATCHES, match_kind
from token_recycling.recycling.suffix_index import (
    BREAK,
    FOUND,
    LONGEST,
    Recorder,
    SuffixIndex,
    find_matches,
    longest_match,
    masked,
)

WALKED, LONG = 16, 3


def matches_of(index, text):
    """Return the next token and the match length of each match."""
    matches, recent = np.zeros(FOUND, module.MATCH), np.full(LONGEST, -1)
    recent[: len(text)] = text[: -LONGEST - 1 : -1]
    count = find_matches(index.arrays, recent, matches)
    return [(int(module.token_at(index.arrays, place)), length) for place, length in matches[:count].tolist()]


def bucket(last, buckets):
    """Return the chain of a position; other tokens may share it."""
    with np.errstate(over="ignore"):
        return int(module._bucket(*last[::-1], *[BREAK] * (LONG - len(last)), buckets))


def searched_matches(added, capacity, text):
    """Return the same by scanning all added tokens; of each chain only the newest positions."""
    held = added[-capacity:] if capacity else []
    wanted = []
    for least in (LONG, 1):
        if len(text) < least or not capacity:
            continue
        chain = bucket(text[-least:], capacity)
        ends = [
            end
            for end in range(len(added) - len(held), len(added))
            # The last tokens when the position was added: the first of them may be evicted since.
            if end + 1 >= least
            and min(last := added[end + 1 - least : end + 1]) >= 0
            and bucket(last, capacity) == chain
        ]
        for end in ends[::-1][:WALKED]:
            before = added[len(added) - len(held) : end + 1]
            length = 0
            while length < min(LONGEST, len(before), len(text)) and before[-1 - length] == text[-1 - length]:
                length += 1
            fits = length >= LONG if least == LONG else 1 <= length < LONG
            if fits and end + 1 < len(added) and added[end + 1] >= 0:
                wanted.append((added[end + 1], length))
    return wanted


TOKENS = st.integers(0, 3)
TEXTS = st.lists(st.one_of(TOKENS, TOKENS, TOKENS, TOKENS, st.just(BREAK)), max_size=90)


@given(TEXTS, st.sampled_from([1, 2, 8, 32, 64]), st.lists(TOKENS, min_size=1, max_size=40), st.integers(1, 30))
def test_matches_equal_those_of_a_full_search(added, capacity, text, piece):
    """For a ring buffer that wrapped around, with chains shared by several tokens, appended in pieces of any length."""
    index = SuffixIndex(capacity=capacity)
    for start in range(0, len(added), piece):
        index.extend(added[start : start + piece])
    assert matches_of(index, text) == searched_matches(added, capacity, text)
    assert index.tokens.tolist() == added[-capacity:]
    assert len(index) == len(added)


@given(st.lists(TOKENS, min_size=1, max_size=90), st.integers(1, 30))
def test_index_without_capacity_grows(text, piece):
    """Earlier occurrences of the end of a growing text."""
    index = SuffixIndex(text[:piece])
    for start in range(piece, len(text), piece):
        index.extend(np.array(text[start : start + piece], np.int32))
    assert index.tokens.tolist() == text
    assert matches_of(index, text) == searched_matches(text, len(index.arrays.tokens), text)


@given(st.lists(TOKENS, max_size=60), st.integers(1, 40))
def test_longest_match_is_found_newest_positions_first(text, compared):
    """Compared with a search of the whole text that checks equally many positions."""
    ends = [
        next((size for size in range(compared, 0, -1) if text[max(0, end - size) : end] == text[-size:]), 0)
        for end in range(1, len(text))
    ]
    best = max(ends, default=0)
    wanted = [place for place, length in enumerate(ends, start=1) if length == best and best]
    places, length = longest_match(SuffixIndex(text).arrays, np.array(text[-compared:], np.int64), 60)
    assert length == best
    if best > 2 or compared > 2:
        assert places.tolist() == wanted[::-1]
    assert sorted(places.tolist()) == wanted


def test_positions_are_renumbered_before_they_overflow(monkeypatch):
    monkeypatch.setattr(module, "_RENUMBERED", 40)
    generator = np.random.default_rng(0)
    added, index = generator.integers(0, 3, 200).tolist(), SuffixIndex(capacity=16)
    for place in range(0, 200, 5):
        index.extend(added[place : place + 5])
        assert len(index) <= 40
        assert index.tokens.tolist() == added[: place + 5][-16:]
        text = added[: place + 5]
        assert matches_of(index, text) == searched_matches(text, 16, text)
    assert len(index) < 200


# History of many sequences


def sequences_of(history):
    """Return the token runs between breaks."""
    pieces = [[]]
    for token in history.tokens.tolist():
        if token == BREAK:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return [piece for piece in pieces if piece]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), max_size=30))
def test_sequences_recorded_concurrently_do_not_mix(turns):
    """Each sequence counts up from its own multiple of 1,000: every run is a piece of one sequence, in order."""
    history = SuffixIndex(capacity=4096)
    recorders, said = [Recorder(history) for _ in range(3)], [0, 0, 0]
    for who, many in [*turns, (0, 1), (1, 1), (2, 1)]:
        recorders[who].add(range(1000 * who + said[who], 1000 * who + said[who] + many))
        said[who] += many
    for who, recorder in enumerate(recorders):
        recorder.add([1000 * who + said[who]], ends=True)
    pieces = sequences_of(history)
    for piece in pieces:
        assert piece == list(range(piece[0], piece[0] + len(piece)))
    # No token is missing, and each further piece begins with the end of the previous piece.
    for who in range(3):
        own = [piece for piece in pieces if piece[0] // 1000 == who]
        assert sorted({token for piece in own for token in piece}) == [1000 * who + one for one in range(said[who] + 1)]
        assert all(second[0] == first[-1] - 31 for first, second in itertools.pairwise(own))


@pytest.mark.parametrize("piece", [32, 64])
def test_matches_across_pieces_have_the_longest_kind(monkeypatch, piece):
    """Sequences recorded concurrently are stored in pieces."""
    monkeypatch.setattr(module, "_PIECE", piece)
    history = SuffixIndex(capacity=4096)
    recorders = [Recorder(history) for _ in range(3)]
    for start in range(0, 256, 4):
        for who, recorder in enumerate(recorders):
            recorder.add(range(1000 * who + start, 1000 * who + start + 4))
    for end in range(32, 256):
        _, length = longest_match(history.arrays, np.arange(1000, 1000 + end), FOUND // 2)
        assert match_kind(length) == MATCHES - 1


def test_repeated_sequence_is_not_stored_again():
    """It is recognized by its last tokens, if there are enough of them."""
    history, text = SuffixIndex(capacity=1024), list(range(128))

    def write(text):
        recorder = Recorder(history)
        for start in range(0, len(text), 32):
            recorder.add(text[start : start + 32], ends=start + 32 >= len(text))

    for _ in range(3):
        write(text)
        assert sequences_of(history) == [text]
    write([*text, *range(500, 532)])
    assert sequences_of(history)[1:] == [[*text[-32:], *range(500, 532)]], "new tokens, and the tokens before them"
    mixed = [*range(300, 332), *text[:64], *range(600, 632)]
    write(mixed)
    assert all(str(piece)[1:-1] in str(mixed) for piece in sequences_of(history)[2:]), "no tokens across the gap"
    assert history.holds([7, 7, 7, *range(40)])
    for other in ([7, *range(LONGEST)], [*range(1, LONGEST)], [*range(39), 50]):
        assert not history.holds(other)


def test_masked_tokens_match_but_are_never_candidates():
    index = SuffixIndex([*masked(np.array([1, 2, 3, 4])).tolist(), 5, 6])
    for text, wanted in (([1, 2, 3, 4], [(5, 4)]), ([3, 4, 5], [(6, 3)]), ([1, 2, 3], []), ([4], [(5, 1)])):
        assert matches_of(index, text) == wanted
