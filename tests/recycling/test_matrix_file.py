import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support import tiny

from token_recycling import AdjacencyMatrix, MatrixFileError, fingerprint
from token_recycling.recycling.matrix import read_matrix
from token_recycling.recycling.matrix_file import FORMAT, VERSION

HEADER = {"format": FORMAT, "version": VERSION, "vocab_size": "50", "k": "4", "tokenizer": "abc"}


def filled(vocab_size=50, k=4, seed=0):
    matrix = AdjacencyMatrix(vocab_size, k)
    generator = torch.Generator().manual_seed(seed)
    matrix.candidates.copy_(torch.randint(0, vocab_size, (vocab_size, k), generator=generator))
    return matrix


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "matrix.safetensors"
    filled().save(path, "abc")
    return path


def refused(path, message, tokenizer="abc"):
    """Loading fails with a clear error that names the file, and the matrix in memory stays as it was."""
    matrix = filled(seed=1)
    before = matrix.candidates.clone()
    with pytest.raises(MatrixFileError, match=message) as caught:
        matrix.load(path, tokenizer)
    assert str(path) in str(caught.value)
    assert torch.equal(matrix.candidates, before)


def test_a_saved_matrix_is_loaded_as_it_was(saved):
    matrix = AdjacencyMatrix(50, 4)
    storage = matrix.storage
    matrix.load(saved, "abc")
    assert torch.equal(matrix.candidates, filled().candidates)
    assert matrix.storage is storage
    again, header = read_matrix(saved)
    assert torch.equal(again.candidates, matrix.candidates)
    assert header == HEADER


def test_a_matrix_of_an_unknown_tokenizer_is_taken(saved, tmp_path):
    AdjacencyMatrix(50, 4).load(saved)
    unnamed = tmp_path / "unnamed"
    filled().save(unnamed)
    matrix = AdjacencyMatrix(50, 4)
    matrix.load(unnamed, "abc")
    assert torch.equal(matrix.candidates, filled().candidates)


def test_saving_makes_folders_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "new" / "folder" / "matrix"
    filled(seed=1).save(path)
    filled(seed=2).save(path)
    assert torch.equal(read_matrix(path)[0].candidates, filled(seed=2).candidates)
    assert os.listdir(path.parent) == ["matrix"]


def test_a_saved_file_has_the_usual_permissions(tmp_path):
    before = os.umask(0o027)
    try:
        filled().save(tmp_path / "matrix")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "matrix").stat().st_mode) == 0o640


@pytest.mark.parametrize("failing", ["pathlib.Path.write_bytes", "os.replace", "os.fsync"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(saved, monkeypatch, failing, error):
    old = saved.read_bytes()

    def fail(*args, **kwargs):
        if failing.endswith("write_bytes"):
            Path(str(args[0])).write_text("half")
        raise error

    monkeypatch.setattr(failing, fail)
    with pytest.raises(type(error)):
        filled(seed=3).save(saved)
    assert saved.read_bytes() == old
    assert os.listdir(saved.parent) == [saved.name]


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no matrix file at"):
        AdjacencyMatrix(50, 4).load(tmp_path / "none")


def test_a_folder_is_no_matrix(tmp_path):
    refused(tmp_path, "cannot be read")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(saved, share):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: int(len(whole) * share)])
    refused(saved, "cannot be read|no matrix")


def test_bytes_too_many_are_refused(saved):
    saved.write_bytes(saved.read_bytes() + b"\0\0\0\0")
    refused(saved, "cannot be read")


def test_a_file_with_a_changed_bit_is_refused_or_a_whole_matrix(tmp_path):
    """No damage lets a candidate out of the vocabulary into a draft."""
    path, refusals = tmp_path / "matrix", 0
    filled(4, 1).save(path, "abc")
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                candidates = read_matrix(path)[0].candidates
            except MatrixFileError:
                refusals += 1
            else:
                assert candidates.shape == (4, 1)
                assert 0 <= int(candidates.min()) <= int(candidates.max()) < 4
    assert refusals > 4 * len(whole)


def test_a_file_of_another_model_is_refused(tmp_path, saved):
    filled(vocab_size=60).save(tmp_path / "vocabulary")
    filled(k=5).save(tmp_path / "k")
    refused(tmp_path / "vocabulary", "a vocabulary of 50, got 60")
    refused(tmp_path / "k", "k of 4, got 5")
    refused(saved, "tokenizer of other, got abc", tokenizer="other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.fill_(50), "candidates from 0 to 49"),
        (lambda ids: ids[3, 1].fill_(2**31 - 1), "candidates from 0 to 49"),
        (lambda ids: ids[49, 3].fill_(-1), "candidates from 0 to 49, got -1"),
    ],
)
def test_ids_out_of_range_are_refused(tmp_path, change, message):
    candidates = filled().candidates
    change(candidates)
    save_file({"candidates": candidates}, tmp_path / "matrix", metadata=HEADER)
    refused(tmp_path / "matrix", message)


@pytest.mark.parametrize(
    ("tensors", "header", "message"),
    [
        ({"candidates": filled().candidates.long()}, {}, "int32 ids"),
        ({"candidates": filled().candidates.float()}, {}, "int32 ids"),
        ({"candidates": filled().candidates.flatten()}, {}, "int32 ids"),
        ({"candidates": filled().candidates[:, :3].contiguous()}, {}, "= 50 x 4"),
        ({"candidates": torch.zeros(0, 4, dtype=torch.int32)}, {"vocab_size": "0"}, "int32 ids"),
        (
            {"candidates": torch.zeros(4, 50, dtype=torch.int32)},
            {"vocab_size": "4", "k": "50"},
            "at most the vocabulary",
        ),
        ({"candidates": filled().candidates}, {"vocab_size": None}, "None x 4"),
        ({"candidates": filled().candidates}, {"k": None}, "50 x None"),
        ({"candidates": filled().candidates}, {"version": "5"}, "version 5"),
        ({"candidates": filled().candidates}, {"version": None}, "version None"),
        ({"candidates": filled().candidates}, {"format": None}, "no matrix"),
        ({"candidates": filled().candidates}, {"format": "pt"}, "no matrix"),
        ({"weights": filled().candidates}, {}, "another one"),
        ({"candidates": filled().candidates, "more": torch.zeros(1)}, {}, "another one"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, tensors, header, message):
    metadata = {key: value for key, value in {**HEADER, **header}.items() if value is not None}
    save_file(tensors, tmp_path / "matrix", metadata=metadata)
    refused(tmp_path / "matrix", message)


def test_a_safetensors_file_without_metadata_is_refused(tmp_path):
    save_file({"candidates": filled().candidates}, tmp_path / "matrix")
    refused(tmp_path / "matrix", "no matrix")


def test_a_fingerprint_names_the_meaning_of_ids(tokenizer):
    before = fingerprint(tokenizer)
    assert before == fingerprint(tiny.tokenizer())
    assert len(before) == 16
    other = tiny.tokenizer()
    other.add_tokens(["<another>"])
    assert fingerprint(other) != before
