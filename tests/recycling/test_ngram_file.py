"""The file of a matrix of contexts: the same after loading, and refused where it is damaged or another's."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.matrices import learn

from token_recycling import AdjacencyMatrix, MatrixFileError
from token_recycling.recycling.matrix import read_matrix
from token_recycling.recycling.matrix_file import read_matrix_file
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.recycling.suffix_index import BREAK

PAST = [1, 2, 0, 3]


def taught(**options):
    matrix = NgramMatrix(**{"vocab_size": 50, "k": 2, "orders": 3, "memory": 0.01, "history": 8, **options})
    learn(matrix, ([7, 8, 9], {3: 0.5, 4: 0.25}), ([1, 2, 3], {4: 0.75, 5: 0.125}))
    matrix.calibration[3] = [2, 5]
    matrix.history.extend([BREAK, *PAST])
    return matrix


def same(matrix, wanted):
    """Whether both hold the same, and would be found the same in."""
    ours, theirs = ([*one.rows, one.calibration, one.history.tokens] for one in (matrix, wanted))
    return all(np.array_equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "matrix.safetensors"
    taught().save(path, "abc")
    return path


@pytest.mark.parametrize("orders", [1, 3])
def test_a_saved_matrix_is_loaded_as_it_was(tmp_path, orders):
    path, wanted = tmp_path / "matrix", taught(orders=orders)
    wanted.save(path, "abc")
    matrix = NgramMatrix(50, k=2, orders=orders, memory=0.01, history=8)
    arrays = matrix.rows
    matrix.load(path, "abc")
    assert same(matrix, wanted)
    assert matrix.rows is arrays
    assert matrix.look_up(9) == wanted.look_up(9) != []


def test_the_adjacency_matrix_of_the_file_can_be_read_alone(saved):
    """By the published method, which has no use for the rest."""
    matrix, header = read_matrix(saved)
    np.testing.assert_array_equal(matrix.candidates.numpy(), taught().candidates)
    assert (header["vocab_size"], header["k"], header["orders"], header["tokenizer"]) == ("50", "2", "3", "abc")
    published = AdjacencyMatrix(50, 2)
    published.load(saved, "abc")
    assert published.candidates[9].tolist() == [3, 4]


def refused(path, message, tokenizer="abc"):
    matrix = taught()
    with pytest.raises(MatrixFileError, match=message) as caught:
        matrix.load(path, tokenizer)
    assert str(path) in str(caught.value)
    assert same(matrix, taught())


def test_a_file_of_the_published_method_is_refused(tmp_path):
    AdjacencyMatrix(50, 2).save(tmp_path / "matrix")
    refused(tmp_path / "matrix", "published")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 60}, "a vocabulary of 50, got 60"),
        ({"k": 3}, "k of 2, got 3"),
        ({"orders": 2}, "orders of 3, got 2"),
    ],
)
def test_a_file_of_another_size_is_refused(tmp_path, options, message):
    NgramMatrix(**{"vocab_size": 50, "k": 2, "orders": 3, "memory": 0.01, **options}).save(tmp_path / "matrix")
    refused(tmp_path / "matrix", message)


def test_a_file_of_another_tokenizer_is_refused(saved):
    refused(saved, "tokenizer of other, got abc", tokenizer="other")
    NgramMatrix(50, k=2, orders=3, memory=0.01).load(saved)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("shares", lambda held: held[:, :1], "expected shares of"),
        ("shares", lambda held: held.to(torch.int32), "expected shares of"),
        ("context_candidates", lambda held: held[1:], "expected context_candidates of"),
        ("context_candidates", lambda held: held + 50, "expected context_candidates from 0 to 49"),
        ("context_shares", lambda held: held.to(torch.float32), "expected context_shares of"),
        ("context_keys", lambda held: held[:, None], "expected context_keys of"),
        ("context_keys", lambda held: held.to(torch.int32), "expected context_keys of"),
        ("calibration", lambda held: held[1:], "1638"),
        ("calibration", lambda held: held.to(torch.int64), "expected calibration of"),
        ("calibration", lambda held: held * float("nan"), "expected counts in calibration"),
        ("calibration", lambda held: held - 1, "expected counts in calibration"),
        ("calibration", lambda held: held.flip(1), "expected counts in calibration"),
        ("history", lambda held: held + 50, "expected history from -51 to 49, got 49 to 53"),
        ("history", lambda held: held - 51, "expected history from -51 to 49, got -52 to -48"),
        ("history", lambda held: held.to(torch.int64), "expected history of"),
        ("history", lambda held: held[:, None], "expected history of"),
    ],
)
def test_a_damaged_file_is_refused(saved, name, change, message):
    header = read_matrix_file(saved)[1]
    tensors = load_file(saved)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, saved, metadata=header)
    refused(saved, message)


def test_a_file_without_a_part_is_refused(saved):
    header = read_matrix_file(saved)[1]
    for name in load_file(saved):
        tensors = {other: tensor for other, tensor in load_file(saved).items() if other != name}
        path = saved.with_name(f"without {name}")
        save_file(tensors, path, metadata=header)
        refused(path, "lacks a part")


def test_a_file_of_another_version_is_refused(saved):
    header = {**read_matrix_file(saved)[1], "version": "5"}
    save_file(load_file(saved), saved, metadata=header)
    refused(saved, "version 5")


@pytest.mark.parametrize("memory", [0.0, 0.00004, 0.02])
def test_a_matrix_of_another_memory_takes_what_fits(saved, memory):
    """It finds what it would have learned itself, in the places that it has for that."""
    matrix, wanted = taught(memory=memory), taught()
    learn(matrix, ([40, 41, 42], {1: 1.0, 2: 0.0}))
    matrix.load(saved, "abc")
    contexts = [(8, 9), (7, 8, 9), (2, 3), (1, 2, 3)]
    kept = [context for context in contexts if matrix.look_up(*context)]
    assert len(kept) == matrix.ngrams == {0.0: 0, 0.00004: matrix.ngrams, 0.02: 4}[memory]
    assert len(kept) <= len(matrix.rows.keys)
    assert bool(kept) == (memory > 0)
    for context in [(9,), (3,), *kept]:
        assert matrix.look_up(*context) == wanted.look_up(*context)


@pytest.mark.parametrize("history", [0, 2, 4, 64])
def test_a_matrix_of_another_past_takes_the_newest(saved, history):
    matrix = taught(history=history)
    matrix.load(saved, "abc")
    assert matrix.history.tokens.tolist() == ([BREAK, *PAST][-history:] if history else [])
    assert matrix.history.capacity == history


def test_only_contexts_that_are_known_take_room_in_the_file(tmp_path):
    for memory in (0.1, 10.0):
        taught(memory=memory).save(tmp_path / str(memory))
    assert load_file(tmp_path / "10.0")["context_keys"].shape == (4,)
    assert (tmp_path / "10.0").stat().st_size == (tmp_path / "0.1").stat().st_size


def test_a_past_that_went_round_is_saved_in_order(tmp_path):
    first, second = taught(), taught()
    first.history.extend([10, 11, 12, 13, 14])
    first.save(tmp_path / "matrix", "abc")
    second.load(tmp_path / "matrix", "abc")
    assert second.history.tokens.tolist() == [2, 0, 3, 10, 11, 12, 13, 14]
    assert second.history.tokens.tolist() == first.history.tokens.tolist()
