"""Matrix files: a load restores what was saved, or is refused and changes nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import load_file, save_file
from support import tiny
from support.matrices import learn

from token_recycling import MatrixFileError, fingerprint
from token_recycling.drafters.published import AdjacencyMatrix
from token_recycling.recycling.matrix_file import FORMAT, VERSION, read_matrix_file
from token_recycling.recycling.ngram_matrix import NgramMatrix
from token_recycling.recycling.suffix_index import BREAK

SIZES = {"vocab_size": 50, "k": 2, "orders": 3, "memory": 0.01, "history": 8}
TOKEN = st.integers(0, 5)


def published(vocab_size=50, k=4, seed=0):
    matrix = AdjacencyMatrix(vocab_size, k)
    generator = torch.Generator().manual_seed(seed)
    matrix.candidates.copy_(torch.randint(0, vocab_size, (vocab_size, k), generator=generator))
    return matrix


def learned_matrix(**sizes):
    matrix = NgramMatrix(**{**SIZES, **sizes})
    learn(matrix, ([7, 8, 9], {3: 0.5, 4: 0.25}), ([1, 2, 3], {4: 0.75, 5: 0.125}))
    matrix.calibration[3] = [2, 5]
    matrix.history.extend([BREAK, 1, 2, 0, 3])
    return matrix


def contents(matrix):
    """Return all data of a matrix."""
    if isinstance(matrix, AdjacencyMatrix):
        return matrix.candidates.numpy().tobytes()
    return [array.tobytes() for array in (*matrix.rows, matrix.calibration, matrix.history.tokens)]


def assert_refused(matrix, path, value="", tokenizer="abc"):
    """Assert that loading raises an error that names the file and the value, and leaves the matrix unchanged."""
    before = contents(matrix)
    with pytest.raises(MatrixFileError) as caught:
        matrix.load(path, tokenizer)
    assert str(path) in str(caught.value)
    assert value in str(caught.value)
    assert contents(matrix) == before


class Files(RuleBasedStateMachine):
    """Teach, save and load a matrix, compared with a dictionary of rows and a list of the newest tokens."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "new" / "matrix"
        self.matrix, self.rows, self.history = NgramMatrix(**{**SIZES, "memory": 4}), {}, []
        self.ever = set()
        self.saved = None

    def teardown(self):
        self.folder.cleanup()

    @initialize(texts=st.lists(st.lists(TOKEN, min_size=1, max_size=5), max_size=4))
    def save_some_rows(self, texts):
        for first, text in enumerate(texts):
            self.teach(text, first)
        if texts:
            self.save("abc")

    @rule(text=st.lists(TOKEN, min_size=1, max_size=5), first=TOKEN)
    def teach(self, text, first):
        row = {first: 0.5, (first + 1) % 50: 0.25}
        learn(self.matrix, (text, row))
        self.rows |= {tuple(text[-order:]): row for order in range(1, min(3, len(text)) + 1)}
        self.ever |= self.rows.keys()
        self.matrix.calibration[text[0]] += [first % 2, 1]

    @rule(tokens=st.lists(TOKEN, max_size=12))
    def write(self, tokens):
        self.matrix.history.extend(tokens)
        self.history = (self.history + tokens)[-8:]

    @rule(tokenizer=st.sampled_from(["", "abc"]))
    def save(self, tokenizer):
        self.matrix.save(self.path, tokenizer)
        self.saved = (dict(self.rows), list(self.history), self.matrix.calibration.tolist(), tokenizer)
        assert os.listdir(self.path.parent) == ["matrix"]

    @rule(failing=st.sampled_from(["os.replace", "os.fsync"]), error=st.sampled_from([OSError, KeyboardInterrupt]))
    def fail_to_save(self, failing, error):
        """Fail as on a full disk: the old file stays."""
        before = self.path.read_bytes() if self.saved else None
        with mock.patch(failing, side_effect=error), pytest.raises(error):
            self.matrix.save(self.path, "other")
        assert (self.path.read_bytes() if self.path.exists() else None) == before
        assert len(os.listdir(self.path.parent)) == (before is not None)

    @rule(tokenizer=st.sampled_from(["", "abc"]))
    def load(self, tokenizer):
        if self.saved is None:
            with pytest.raises(FileNotFoundError, match=self.folder.name):
                self.matrix.load(self.path, tokenizer)
            return
        arrays = self.matrix.rows
        self.matrix.load(self.path, tokenizer)
        self.rows, self.history = dict(self.saved[0]), list(self.saved[1])
        assert self.matrix.calibration.tolist() == self.saved[2]
        assert self.matrix.rows is arrays, "compiled functions hold references to these arrays"

    @rule(memory=st.sampled_from([0.0, 0.00004, 4]), history=st.sampled_from([0, 2, 64]), before=TOKEN)
    def load_into_another_size(self, memory, history, before):
        """Load what fits: as many contexts as there are slots, and the newest tokens of the history."""
        if self.saved is None:
            return
        other = NgramMatrix(**{**SIZES, "memory": memory, "history": history})
        learn(other, ([before, before, before], {1: 0.5, 2: 0.25}))
        other.load(self.path, "abc")
        rows, tokens, *_ = self.saved
        longer = [context for context in rows if len(context) > 1 and other.look_up(*context)]
        assert len(longer) == other.ngrams <= len(other.rows.keys)
        assert memory != 4 or other.ngrams == sum(len(context) > 1 for context in rows)
        for context in [*longer, *(context for context in rows if len(context) == 1)]:
            assert dict(other.look_up(*context)) == pytest.approx(rows[context], abs=1e-4)
        assert other.history.tokens.tolist() == (tokens[-history:] if history else [])

    @rule(share=st.floats(0, 0.999))
    def load_truncated_or_extended_file(self, share):
        if self.saved is not None:
            whole = self.path.read_bytes()
            for damaged in (whole[: int(len(whole) * share)], whole + b"\0\0\0\0"):
                self.path.write_bytes(damaged)
                assert_refused(self.matrix, self.path)
            self.path.write_bytes(whole)

    @invariant()
    def matrix_contains_all_learned_rows(self):
        for context, row in self.rows.items():
            assert dict(self.matrix.look_up(*context)) == pytest.approx(row, abs=1e-4)
        assert not any(self.matrix.look_up(*context) for context in self.ever - self.rows.keys())
        assert self.matrix.ngrams == sum(len(context) > 1 for context in self.rows)
        assert self.matrix.history.tokens.tolist() == self.history


Files.TestCase.settings = settings(max_examples=20, stateful_step_count=20)
TestFiles = Files.TestCase


def test_published_loads_its_own_file_and_rows_of_ngram_files(tmp_path):
    wanted = published()
    for path, matrix in ((tmp_path / "own", wanted), (tmp_path / "other", learned_matrix())):
        matrix.save(path, "abc")
    loaded = AdjacencyMatrix(50, 4)
    storage = loaded.storage
    loaded.load(tmp_path / "own", "abc")
    assert torch.equal(loaded.candidates, wanted.candidates)
    assert loaded.storage is storage
    loaded = AdjacencyMatrix(50, 2)
    loaded.load(tmp_path / "other", "abc")
    assert loaded.candidates[9].tolist() == [3, 4]
    header = read_matrix_file(tmp_path / "other")[1]
    assert (header["vocab_size"], header["k"], header["orders"], header["tokenizer"]) == ("50", "2", "3", "abc")


@pytest.mark.parametrize(
    ("saved", "loaded", "value"),
    [
        (published(60), published(), "got 60"),
        (published(k=5), published(), "got 5"),
        (published(), learned_matrix(), "published"),
        (learned_matrix(vocab_size=60), learned_matrix(), "got 60"),
        (NgramMatrix(**{**SIZES, "k": 3}), learned_matrix(), "got 3"),
        (learned_matrix(orders=2), learned_matrix(), "got 2"),
    ],
    ids=str,
)
def test_file_of_another_model_is_refused(tmp_path, saved, loaded, value):
    saved.save(tmp_path / "matrix")
    assert_refused(loaded, tmp_path / "matrix", value)


@pytest.mark.parametrize("kind", [published, learned_matrix])
def test_file_of_another_tokenizer_is_refused_and_of_an_unknown_one_accepted(tmp_path, kind):
    path = tmp_path / "matrix"
    kind().save(path, "abc")
    assert_refused(kind(), path, "another", tokenizer="another")
    kind().load(path)
    kind().save(path)
    kind().load(path, "abc")


IDS = published().candidates
NUMBERS = IDS.clone()
NUMBERS[49, 3] = -1
ARRAYS = ("shares", "context_keys", "context_candidates", "context_shares", "calibration", "history")
CHANGES = [lambda held: held[:, None], lambda held: held.to(torch.float64), lambda held: held.to(torch.int8)]
"""Invalid changes of any array: another shape, other dtypes."""
DAMAGED = [
    (published, {"candidates": IDS.long()}, {}, "int64"),
    (published, {"candidates": IDS.flatten()}, {}, "got int32 of 200"),
    (published, {"candidates": IDS[:, :3].contiguous()}, {}, "50x4"),
    (published, {"candidates": IDS + 50}, {}, "0 to 49"),
    (published, {"candidates": NUMBERS}, {}, "got -1"),
    (published, {"candidates": IDS.masked_fill(IDS == 49, 50)}, {}, "to 50"),
    (published, {"candidates": torch.zeros(0, 4, dtype=torch.int32)}, {"vocab_size": "0"}, "0x4"),
    (published, {"candidates": torch.zeros(4, 50, dtype=torch.int32)}, {"vocab_size": "4", "k": "50"}, "vocabulary"),
    (published, {"more": torch.zeros(1)}, {}, ""),
    (published, {}, {"vocab_size": None}, "Nonex4"),
    (published, {}, {"k": None}, "50xNone"),
    *(
        (kind, {}, {"version": version}, f"version {version}")
        for kind in (published, learned_matrix)
        for version in ("5", None)
    ),
    *((kind, {}, {"format": name}, "") for kind in (published, learned_matrix) for name in ("pt", None)),
    *((learned_matrix, {name: change}, {}, "") for name in ARRAYS for change in CHANGES),
    *((learned_matrix, {name: None}, {}, "") for name in ARRAYS),
    (learned_matrix, {"context_candidates": lambda held: held + 50}, {}, "context_candidates"),
    (learned_matrix, {"calibration": lambda held: held[1:]}, {}, "2184"),
    (learned_matrix, {"calibration": lambda held: held * float("nan")}, {}, "calibration"),
    (learned_matrix, {"calibration": lambda held: held - 1}, {}, "calibration"),
    (learned_matrix, {"calibration": lambda held: held.flip(1)}, {}, "calibration"),
    (learned_matrix, {"history": lambda held: held + 47}, {}, "got 46 to 50"),
    (learned_matrix, {"history": lambda held: held - 51}, {}, "got -52 to -48"),
]


@pytest.mark.parametrize(("kind", "tensors", "header", "value"), DAMAGED)
def test_invalid_arrays_and_headers_are_refused(tmp_path, kind, tensors, header, value):
    path = tmp_path / "matrix"
    kind().save(path, "abc")
    held = load_file(path)
    for name, change in tensors.items():
        held[name] = change(held[name]).contiguous() if callable(change) else change
    stated = {"format": FORMAT, "version": VERSION, **read_matrix_file(path)[1], **header}
    save_file(
        {name: one for name, one in held.items() if one is not None},
        path,
        metadata={name: one for name, one in stated.items() if one is not None},
    )
    assert_refused(kind(), path, value)


def test_folder_and_file_without_header_are_refused(tmp_path):
    save_file({"candidates": IDS}, tmp_path / "matrix")
    assert_refused(published(), tmp_path / "matrix")
    assert_refused(published(), tmp_path)


def test_file_with_a_flipped_bit_is_refused_or_valid(tmp_path):
    """No damage lets a candidate outside the vocabulary into a draft."""
    path, refusals = tmp_path / "matrix", 0
    published(4, 1).save(path, "abc")
    whole = path.read_bytes()
    places = range(0, 8 * len(whole), 5)
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            candidates = read_matrix_file(path)[0]["candidates"]
        except MatrixFileError:
            refusals += 1
        else:
            assert candidates.shape == (4, 1)
            assert 0 <= int(candidates.min()) <= int(candidates.max()) < 4
    assert refusals > 0.9 * len(places)


def test_fingerprint_depends_on_the_vocabulary(tokenizer):
    before = fingerprint(tokenizer)
    assert before == fingerprint(tiny.tokenizer())
    other = tiny.tokenizer()
    other.add_tokens(["<another>"])
    assert fingerprint(other) != before
