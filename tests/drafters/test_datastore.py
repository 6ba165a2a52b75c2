"""The datastore: look-ups against a search of the whole text, and files that are not to be trusted."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from token_recycling.drafters.rest.datastore import FORMAT, VERSION, Datastore, DatastoreError, build

DOCUMENTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("datastore")


def places(documents: list[list[int]], ngram: list[int]) -> set[int]:
    """Where `ngram` begins in the documents, each followed by a place of no token."""
    found, start = set(), 0
    for document in documents:
        for place in range(len(document) - len(ngram) + 1):
            if document[place : place + len(ngram)] == ngram:
                found.add(start + place)
        start += len(document) + 1
    return found


@given(DOCUMENTS, st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_an_ngram_is_found_wherever_it_stands(folder: Path, documents: list[list[int]], ngram: list[int]) -> None:
    store = build(documents, folder / "found")
    slots = store.find(ngram)
    assert {int(store.suffixes[slot]) for slot in slots} == places(documents, ngram)
    assert len(slots) == len(places(documents, ngram))


@given(DOCUMENTS, st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 3), st.integers(3, 9))
def test_the_longest_suffix_is_found(
    folder: Path, documents: list[list[int]], text: list[int], shortest: int, longest: int
) -> None:
    store = build(documents, folder / "longest")
    wanted = next(
        (
            length
            for length in range(min(longest, len(text)), shortest - 1, -1)
            if places(documents, text[len(text) - length :])
        ),
        0,
    )
    slots, length = store.longest_suffix(text, longest, shortest)
    assert length == wanted
    assert slots == (store.find(text[len(text) - length :]) if length else range(0))


def test_what_followed_is_read_in_order_and_no_further_than_the_document(tmp_path: Path) -> None:
    store = build([[1, 2, 5, 6], [1, 2, 3, 4], [1, 2]], tmp_path / "store")
    found = store.continuations(store.find([1, 2]), 2, 3, 10)
    assert found[0, 0] == -1
    assert found[1:].tolist() == [[3, 4, -1], [5, 6, -1]]
    assert store.continuations(store.find([9]), 1, 3, 10).shape == (0, 3)


def test_of_too_many_places_some_are_read_at_even_distances(tmp_path: Path) -> None:
    store = build([[1, token] for token in range(2, 12)], tmp_path / "store")
    found = store.continuations(store.find([1]), 1, 1, 5)
    assert found[:, 0].tolist() == [2, 4, 6, 8, 10]


def test_ids_beyond_16_bits_are_kept(tmp_path: Path) -> None:
    """3 + 65,536 is 3 in 16 bits; the published program would find it."""
    build([[3, 7], [3 + 65_536, 8], [200_000, 9]], tmp_path / "store")
    store = Datastore(tmp_path / "store")
    assert store.vocab_size == 200_001
    assert store.continuations(store.find([3]), 1, 1, 10).tolist() == [[7]]
    assert store.continuations(store.find([3 + 65_536]), 1, 1, 10).tolist() == [[8]]


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "no token at all"),
        ([[], []], "no token at all"),
        ([[1, -1]], "got -1 to 1"),
        ([[2**31 - 1]], "got 2147483647"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, documents: list[list[int]], message: str) -> None:
    with pytest.raises(DatastoreError, match=message):
        build(documents, tmp_path / "store")
    assert os.listdir(tmp_path) == []


def test_without_the_sorting_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pydivsufsort", None)
    with pytest.raises(DatastoreError, match=r"got no pydivsufsort; pip install 'token-recycling\[rest\]'"):
        build([[1]], tmp_path / "store")


def test_a_failed_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    build([[1, 2]], tmp_path / "store")

    def fail(_: object, path: str, **__: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("token_recycling.drafters.rest.datastore.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        build([[3, 4]], tmp_path / "store")
    assert os.listdir(tmp_path) == ["store"]
    assert Datastore(tmp_path / "store").find([1, 2])


# files of others


def rewritten(path: Path, arrays: dict[str, np.ndarray] | None = None, **header: str) -> Path:
    """A small datastore with some of its arrays and some of its header replaced."""
    build([[1, 2, 3], [1, 2, 4]], path, "abc")
    held = {**load_file(path), **(arrays or {})}
    stated = {"format": FORMAT, "version": VERSION, "tokenizer": "abc", "vocab_size": "5", **header}
    save_file(held, path, metadata=stated)
    return path


def refused(path: Path, message: str) -> None:
    with pytest.raises(DatastoreError, match=message) as caught:
        Datastore(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Datastore(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Datastore(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.99])
def test_a_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    path = rewritten(tmp_path / "store")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    refused(path, "cannot be read")


@pytest.mark.parametrize(
    ("arrays", "header", "message"),
    [
        ({}, {"format": "other"}, "another safetensors file"),
        ({"more": np.zeros(1)}, {}, "another safetensors file"),
        ({}, {"version": "99"}, "expected format version 1, got 99"),
        ({}, {"vocab_size": "many"}, "damaged"),
        ({"suffixes": np.arange(3, dtype=np.int32)}, {}, "damaged"),
        ({"tokens": np.array([1, 2, 3, -1, 1, 2, 4, -1], dtype=np.int64)}, {}, "damaged"),
        ({"tokens": np.array([1, 2, 3, -1, 1, 2, 4, 5], dtype=np.int32)}, {}, "damaged"),
        ({"tokens": np.zeros(0, dtype=np.int32), "suffixes": np.zeros(0, dtype=np.int32)}, {}, "damaged"),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], header: dict[str, str], message: str
) -> None:
    refused(rewritten(tmp_path / "store", arrays, **header), message)


def test_damage_within_the_arrays_is_found_when_it_is_looked_up(tmp_path: Path) -> None:
    whole = Datastore(rewritten(tmp_path / "store"))
    slots = whole.find([1, 2])
    wrong = whole.tokens.copy()
    wrong[2] = 70
    broken = Datastore(rewritten(tmp_path / "tokens", {"tokens": wrong}))
    with pytest.raises(DatastoreError, match="ids below 5, got 4 to 70: the file is damaged"):
        broken.continuations(slots, 2, 1, 9)
    for place in (-3, 800):
        suffixes = whole.suffixes.copy()
        suffixes[slots[0]] = place
        broken = Datastore(rewritten(tmp_path / "places", {"suffixes": suffixes}))
        with pytest.raises(DatastoreError, match=r"places from 0 to 7, got .*: the file is damaged"):
            broken.continuations(slots, 2, 1, 9)


def test_the_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    """Two openings of one file share its memory with the file: neither array owns any."""
    store = Datastore(rewritten(tmp_path / "store"))
    assert not store.tokens.flags.owndata
    assert not store.suffixes.flags.owndata
