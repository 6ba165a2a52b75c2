"""The file of a matrix of contexts: the same after loading, and refused where it is damaged or another's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.matrices import learn

from token_recycling import AdjacencyMatrix, MatrixFileError
from token_recycling.candidates.matrix import read_matrix
from token_recycling.candidates.matrix_file import read_matrix_file, write_matrix
from token_recycling.candidates.ngram_matrix import NgramMatrix


def taught(**options: float) -> NgramMatrix:
    matrix = NgramMatrix(**{"vocab_size": 50, "k": 2, "orders": 3, "memory": 0.01, **options})
    learn(matrix, ([7, 8, 9], {3: 0.5, 4: 0.25}), ([1, 2, 3], {4: 0.75, 5: 0.125}))
    matrix.calibration[3] = [2, 5]
    return matrix


def unchanged(matrix: NgramMatrix) -> bool:
    """Whether it is as `taught()` made it."""
    ours, wanted = [*matrix.rows, matrix.calibration], [*taught().rows, taught().calibration]
    return all(np.array_equal(one, other) for one, other in zip(ours, wanted, strict=True))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "matrix.safetensors"
    taught().save(path, "abc")
    return path


@pytest.mark.parametrize("orders", [1, 3])
def test_a_saved_matrix_is_loaded_as_it_was(tmp_path: Path, orders: int) -> None:
    path, wanted = tmp_path / "matrix", taught(orders=orders)
    wanted.save(path, "abc")
    matrix = NgramMatrix(50, k=2, orders=orders, memory=0.01)
    arrays = matrix.rows
    matrix.load(path, "abc")
    for ours, other in zip([*matrix.rows, matrix.calibration], [*wanted.rows, wanted.calibration], strict=True):
        np.testing.assert_array_equal(ours, other)
    assert matrix.rows is arrays
    assert matrix.look_up(9) == wanted.look_up(9) != []


def test_the_adjacency_matrix_of_the_file_can_be_read_alone(saved: Path) -> None:
    """By the published method, which has no use for the rest."""
    matrix, header = read_matrix(saved)
    np.testing.assert_array_equal(matrix.candidates.numpy(), taught().candidates)
    assert (header["vocab_size"], header["k"], header["orders"], header["tokenizer"]) == ("50", "2", "3", "abc")
    published = AdjacencyMatrix(50, 2)
    published.load(saved, "abc")
    assert published.candidates[9].tolist() == [3, 4]


def refused(path: Path, message: str, tokenizer: str = "abc") -> None:
    matrix = taught()
    with pytest.raises(MatrixFileError, match=message) as caught:
        matrix.load(path, tokenizer)
    assert str(path) in str(caught.value)
    assert unchanged(matrix)


def test_a_file_of_the_published_method_is_refused(tmp_path: Path) -> None:
    AdjacencyMatrix(50, 2).save(tmp_path / "matrix")
    refused(tmp_path / "matrix", "a matrix with probabilities, got one of the drafter 'published'")


def test_a_file_of_primed_rows_is_refused(tmp_path: Path) -> None:
    tensors = {"candidates": torch.zeros(50, 2, dtype=torch.int32), "shares": torch.zeros(50, 2, dtype=torch.uint16)}
    write_matrix(tmp_path / "matrix", tensors)
    refused(tmp_path / "matrix", "a matrix with contexts, got rows of single tokens alone")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 60}, "a vocabulary of 50, got 60"),
        ({"k": 3}, "k of 2, got 3"),
        ({"orders": 2}, "orders of 3, got 2"),
        ({"memory": 0.02}, r"context_candidates of \(500, 2\), got \(1000, 2\); set the option memory"),
    ],
)
def test_a_file_of_another_size_is_refused(tmp_path: Path, options: dict[str, float], message: str) -> None:
    NgramMatrix(**{"vocab_size": 50, "k": 2, "orders": 3, "memory": 0.01, **options}).save(tmp_path / "matrix")
    refused(tmp_path / "matrix", message)


def test_a_file_of_another_tokenizer_is_refused(saved: Path) -> None:
    refused(saved, "tokenizer of other, got abc", tokenizer="other")
    NgramMatrix(50, k=2, orders=3, memory=0.01).load(saved)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("shares", lambda held: held[:, :1], "expected shares of"),
        ("shares", lambda held: held.to(torch.int32), "expected shares of"),
        ("context_candidates", lambda held: held[1:], "expected context_candidates of"),
        ("context_candidates", lambda held: held + 50, "expected ids from 0 to 49"),
        ("context_shares", lambda held: held.to(torch.float32), "expected context_shares of"),
        ("context_keys", lambda held: held[:, None], "expected context_keys of"),
        ("context_keys", lambda held: held.to(torch.int32), "expected context_keys of"),
        ("calibration", lambda held: held[1:], "expected calibration of"),
        ("calibration", lambda held: held.to(torch.int64), "expected calibration of"),
        ("calibration", lambda held: held * float("nan"), "expected counts in calibration"),
        ("calibration", lambda held: held - 1, "expected counts in calibration"),
        ("calibration", lambda held: held.flip(1), "expected counts in calibration"),
    ],
)
def test_a_damaged_file_is_refused(saved: Path, name: str, change: object, message: str) -> None:
    header = {**read_matrix_file(saved)[1], "version": "1"}  # which has no checksum
    tensors = load_file(saved)
    save_file({**tensors, name: change(tensors[name]).contiguous()}, saved, metadata=header)
    refused(saved, message)


def test_a_file_without_a_part_is_refused(saved: Path) -> None:
    header = {**read_matrix_file(saved)[1], "version": "1"}  # which has no checksum
    for name in load_file(saved):
        tensors = {other: tensor for other, tensor in load_file(saved).items() if other != name}
        path = saved.with_name(f"without {name}")
        save_file(tensors, path, metadata=header)
        refused(path, "another safetensors file")


def test_a_file_cut_short_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for share in (0.0, 0.01, 0.3, 0.99):
        saved.write_bytes(whole[: int(len(whole) * share)])
        refused(saved, "cannot be read|another safetensors file")
