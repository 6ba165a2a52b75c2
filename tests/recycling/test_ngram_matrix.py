"""Candidates after contexts: rows computed by hand, eviction, memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.matrices import learn

from token_recycling.recycling.ngram_matrix import MAX_ORDER, NgramMatrix

BIT = 1 / 65_535
"""The step between two probabilities of 16 bits."""


def row_of(matrix, *context):
    return dict(matrix.look_up(*context))


def close(row, wanted):
    assert list(row) == list(wanted)
    assert list(row.values()) == pytest.approx(list(wanted.values()), abs=BIT)


def test_newer_contexts_replace_older_ones_when_memory_is_full():
    matrix = NgramMatrix(50, k=2, orders=2, memory=0.0002)
    places = len(matrix.rows.keys)
    assert places == 10
    for first in range(40):
        learn(matrix, ([first, 5], {first: 0.5, 49: 0.25}))
        close(row_of(matrix, first, 5), {first: 0.5, 49: 0.25})
    kept = [first for first in range(40) if matrix.look_up(first, 5)]
    assert len(kept) == matrix.ngrams <= places
    assert 39 in kept
    # An overwritten context is unknown: it does not return the row of the context that replaced it.
    for first in kept:
        close(row_of(matrix, first, 5), {first: 0.5, 49: 0.25})


def test_memory_is_bounded():
    """For Llama's 32,000 tokens and 8 candidates a row, rows take under 2 MB; a history token takes 20 bytes."""
    none = NgramMatrix(32_000, k=8, orders=1)
    assert sum(array.nbytes for array in none.rows) == 32_000 * 8 * (4 + 2) == 1_536_000
    counted = none.nbytes - 1_536_000
    assert counted == 8, "one number, the count of tokens"
    for memory in (0.0, 0.01, 2.0, 7.5):
        longer = NgramMatrix(100, k=8, orders=4, memory=memory).nbytes - 100 * 8 * 6 - counted
        assert memory * 1e6 - 56 < longer <= memory * 1e6
    for history in (1, 1024, 262_144):
        held = NgramMatrix(100, k=8, orders=1, history=history)
        assert held.nbytes == 100 * 8 * 6 + counted, "it grows as it is filled"
        held.history.extend(np.zeros(3 * history, np.int64))
        assert held.nbytes == 100 * 8 * 6 + 20 * history + counted


@given(st.data())
def test_rows_equal_those_of_a_dictionary(data):
    """With enough memory, in any order of updates: the last row of each context, and no other contexts."""
    orders = data.draw(st.integers(1, MAX_ORDER))
    texts = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=12))
    matrix = NgramMatrix(6, k=2, orders=orders, memory=20)
    wanted = {}
    for place, text in enumerate(texts):
        row = {place % 6: 0.5, (place + 1) % 6: 0.25 * (place % 2)}
        learn(matrix, (text, row))
        for order in range(1, min(orders, len(text)) + 1):
            wanted[tuple(text[-order:])] = row
    for context, row in wanted.items():
        close(row_of(matrix, *context), row)
    assert matrix.ngrams == sum(len(context) > 1 for context in wanted)
    assert int(matrix.filled.sum()) == sum(len(context) == 1 for context in wanted)


SMALL = NgramMatrix(10, k=2, orders=2)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: NgramMatrix(0, k=2), "got vocabulary 0"),
        (lambda: NgramMatrix(10, k=0), "k 0"),
        (lambda: NgramMatrix(10, k=11), "k 11"),
        (lambda: NgramMatrix(10, k=2, orders=0), "got 0"),
        (lambda: NgramMatrix(10, k=2, orders=5), "got 5"),
        (lambda: NgramMatrix(10, k=2, memory=-1), "got -1"),
        (lambda: NgramMatrix(10, k=2, history=-1), "got -1"),
        (lambda: SMALL.look_up(), "got 0"),
        (lambda: SMALL.look_up(1, 2, 3), "got 3"),
        (lambda: learn(SMALL, ([5], {1: 0.5, 2: 0.2, 3: 0.1})), r"got \(1, 3\)"),
    ],
)
def test_invalid_arguments_are_refused(call, value):
    with pytest.raises(ValueError, match=value):
        call()


def test_tokens_without_a_logit_are_skipped():
    """Some models embed more ids than they have logits. Nothing is stored or found for these; other rows stay
    unchanged.
    """
    matrix = NgramMatrix(10, k=2, orders=2)
    learn(matrix, ([1, 5], {3: 0.5, 4: 0.25}))
    before = [array.copy() for array in matrix.rows]
    learn(matrix, ([5, 10], {1: 0.9, 2: 0.1}), ([5, 99_999], {1: 0.9, 2: 0.1}))
    assert all(np.array_equal(old, new) for old, new in zip(before, matrix.rows, strict=True))
    assert matrix.look_up(10) == matrix.look_up(99_999) == matrix.look_up(5, 10) == matrix.look_up(-1) == []
