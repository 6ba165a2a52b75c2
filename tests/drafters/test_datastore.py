"""The datastore: look-ups compared with a search of the whole text, and damaged files."""

import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from token_recycling.drafters.rest import FORMAT, VERSION, Datastore, DatastoreError, build

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("datastore")


def continuations_of(documents, ngram, length):
    """Return the continuations of all occurrences of `ngram`, up to the end of their document."""
    return sorted(
        document[end : end + length]
        for document in documents
        for end in range(len(ngram), len(document))
        if document[end - len(ngram) : end] == ngram
    )


@given(DOCUMENTS, st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 3), st.integers(3, 9))
def test_continuations_of_the_longest_suffix_are_found(folder, documents, text, shortest, longest):
    store = build(documents, folder / "longest")
    suffixes = (text[len(text) - size :] for size in range(min(longest, len(text)), shortest - 1, -1))
    wanted = next((found for found in (continuations_of(documents, suffix, 4) for suffix in suffixes) if found), [])
    found = store.continuations(np.array(text[-longest:]), shortest, 4, 100).tolist()
    assert sorted([row[: row.index(-1)] if -1 in row else row for row in found]) == wanted
    assert found == sorted(found)


def test_newest_matches_are_read_first_and_ids_may_exceed_16_bits(tmp_path):
    """3 + 65,536 equals 3 in 16 bits; the published program would return a false match."""
    store = build([[1, token] for token in range(2, 12)], tmp_path / "store")
    assert store.continuations(np.array([1]), 1, 1, 5)[:, 0].tolist() == [7, 8, 9, 10, 11]
    assert store.continuations(np.array([12]), 1, 3, 5).shape == (0, 3)
    store = build([[3, 7], [3 + 65_536, 8], [200_000, 9]], tmp_path / "store")
    assert store.vocab_size == 200_001
    assert store.continuations(np.array([3]), 1, 1, 10).tolist() == [[7]]
    assert store.continuations(np.array([3 + 65_536]), 1, 1, 10).tolist() == [[8]]


@pytest.mark.parametrize(
    ("documents", "value"),
    [([], "got 0"), ([[], []], "got 0"), ([[1, -1]], "got -1 to 1"), ([[2**31 - 1]], "got 2147483647")],
)
def test_invalid_documents_are_refused(tmp_path, documents, value):
    with pytest.raises(DatastoreError, match=value):
        build(documents, tmp_path / "store")
    assert os.listdir(tmp_path) == []


# damaged files


def modified_store(path, arrays=None, **header):
    """Write a small datastore with some arrays and header fields replaced."""
    build([[1, 2, 3], [1, 2, 4]], path, "abc")
    held = {**load_file(path), **(arrays or {})}
    stated = {"format": FORMAT, "version": VERSION, "tokenizer": "abc", "vocab_size": "5", **header}
    save_file(held, path, metadata=stated)
    return path


@pytest.mark.parametrize(
    ("arrays", "header", "length"),
    [
        *(({}, {}, share) for share in (0.0, 0.01, 0.3, 0.9, 0.99)),
        ({}, {"format": "other"}, 1),
        ({"more": np.zeros(1)}, {}, 1),
        ({}, {"version": "1"}, 1),
        ({}, {"vocab_size": "many"}, 1),
        ({"before": np.zeros((2, 3), np.int32)}, {}, 1),
        ({"newest": np.zeros((2, 7), np.int32)}, {}, 1),
        ({"newest": np.zeros((2, 0), np.int32)}, {}, 1),
        ({"added": np.array([3])}, {}, 1),
        ({"tokens": np.array([1, 2, 3, -1, 1, 2, 4, -1], dtype=np.int64)}, {}, 1),
        ({"tokens": np.array([1, 2, 3, -1, 1, 2, 4, 5], dtype=np.int32)}, {}, 1),
        ({"tokens": np.zeros(0, dtype=np.int32), "before": np.zeros((2, 0), np.int32)}, {}, 1),
    ],
    ids=str,
)
def test_truncated_or_invalid_files_are_refused(tmp_path, arrays, header, length):
    path = modified_store(tmp_path / "store", arrays, **header)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * length)])
    with pytest.raises(DatastoreError, match=re.escape(str(path))):
        Datastore(path)
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            Datastore(missing)


@pytest.mark.parametrize("place", [-(2**31), -3, 7, 8, 800, 2**31 - 1])
def test_damaged_chains_end_and_invalid_tokens_are_refused(tmp_path, place):
    """With any positions, reads stay within the text and every look-up ends. Invalid tokens are found by look-ups."""
    for name in ("before", "newest"):
        array = getattr(Datastore(modified_store(tmp_path / "store")).index, name)
        broken = Datastore(modified_store(tmp_path / name, {name: np.full_like(array, place)}))
        assert len(broken.continuations(np.array([1, 2]), 2, 2, 5000)) <= 5000
    wrong = Datastore(tmp_path / "store").tokens.copy()
    wrong[2] = 70
    broken = Datastore(modified_store(tmp_path / "tokens", {"tokens": wrong}))
    with pytest.raises(DatastoreError, match="got 4 to 70"):
        broken.continuations(np.array([1, 2]), 2, 1, 9)
