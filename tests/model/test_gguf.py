"""A loaded GGUF file is the model that transformers reads from it, unpacked once, completely or not at all."""

import json
import os
import resource
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf as ggml
import pytest
import torch
from support import tiny
from support.cases import thinned
from support.gguf_files import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

import token_recycling as tr
from token_recycling._util import extras
from token_recycling.model import gguf_files, loading

TOKENIZER = tiny.tokenizer()
TOKENS = TOKENIZER.convert_ids_to_tokens(range(len(TOKENIZER)))
MERGES = [" ".join(pair) for pair in json.loads(TOKENIZER.backend_tokenizer.to_str())["model"]["merges"]]
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
KINDS = ggml.GGMLQuantizationType


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path / "cache"))


def write(path, **how):
    write_gguf(tiny.llama(vocab_size=len(TOKENS), head_dim=8), path, TOKENS, MERGES, **how)
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.Q8_0.gguf", kind=KINDS.Q8_0, add_chat_template=TEMPLATE)


@pytest.fixture
def file(original, tmp_path):
    return Path(shutil.copy2(original, tmp_path))


def assert_refused(path, message):
    with pytest.raises(ValueError, match=message):
        loading.resolved(str(path))
    assert unpacked_folders() == []


def unpacked_folders():
    return sorted(each.name for each in gguf_files.unpacked_in().glob("*") if each.is_dir())


@pytest.mark.parametrize("kind", thinned([KINDS.Q4_1, KINDS.F32, KINDS.BF16, KINDS.F16]))
def test_loaded_model_equals_the_one_that_transformers_reads(tmp_path, kind):
    file = write(tmp_path / "tiny.gguf", kind=kind)
    one = {"pretrained_model_name_or_path": tmp_path, "gguf_file": file.name}
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(**one), AutoTokenizer.from_pretrained(**one)
    ours = tr.load(file)
    state = ours.model.state_dict()
    assert ours.model.dtype == torch.float32
    assert {name: value.float() for name, value in theirs.state_dict().items()}.keys() == state.keys()
    assert all(torch.equal(value.float(), state[name]) for name, value in theirs.state_dict().items())
    text = "for index in range(10): import sys"
    assert ours.tokenizer(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert ours.tokenizer.get_vocab() == tokenizer.get_vocab()


def test_16_bit_weights_are_stored_in_16_bits(tmp_path):
    sizes = {}
    for kind in (KINDS.F32, KINDS.BF16, KINDS.F16):
        folder = gguf_files.unpacked(write(tmp_path / f"{kind.name}.gguf", kind=kind))
        sizes[kind] = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert sizes[KINDS.BF16] < 0.6 * sizes[KINDS.F32]
    assert sizes[KINDS.F16] < 0.6 * sizes[KINDS.F32]


def test_file_is_unpacked_once_and_again_after_a_change(file):
    folder = gguf_files.unpacked(file)
    (folder / "mark").touch()
    assert gguf_files.unpacked(file) == folder
    assert (folder / "mark").exists()
    assert gguf_files.is_unpacked(file)
    write(file)
    assert not gguf_files.is_unpacked(file)
    assert gguf_files.unpacked(file) != folder
    assert not folder.exists()
    assert loading.title(str(file)) == "tiny.Q8_0", "without the path"


def test_unpacked_folder_is_reused_by_other_releases_of_transformers(file, monkeypatch):
    folder = gguf_files.unpacked(file)
    monkeypatch.setattr("importlib.metadata.version", lambda package: "6.0.0")
    monkeypatch.setattr("transformers.__version__", "6.0.0")
    assert gguf_files.unpacked(file) == folder
    assert unpacked_folders() == [folder.name]


OUTDATED = {
    "deleted": lambda file, record: file.unlink(),
    "written again": lambda file, record: os.utime(file, (1, 1)),
    "drive not there": lambda file, record: shutil.rmtree(file.parent),
    "no record": lambda file, record: record.unlink(),
    "broken record": lambda file, record: record.write_text("{"),
}


def test_folders_of_deleted_or_changed_files_are_removed(file, tmp_path):
    folders = {}
    for name in OUTDATED:
        (tmp_path / name).mkdir()
        folders[name] = gguf_files.unpacked(Path(shutil.copy2(file, tmp_path / name / f"{name}.gguf")))
    for name, change in OUTDATED.items():
        change(tmp_path / name / f"{name}.gguf", folders[name] / "gguf_source.json")
    gguf_files.unpacked(file)
    assert [name for name, folder in folders.items() if not folder.exists()] == ["deleted", "written again"]
    assert gguf_files.is_unpacked(file)


def test_end_of_turn_token_ends_generation(tmp_path):
    file = write(tmp_path / "tiny.gguf", add_eot_token_id=7)
    assert tr.load(file).model.generation_config.eos_token_id == [0, 7]
    (tmp_path / "one").mkdir()
    assert tr.load(write(tmp_path / "one" / "tiny.gguf")).model.generation_config.eos_token_id == 0


def test_files_next_to_the_gguf_file_are_ignored(file):
    alone = tr.load(file).tokenizer.chat_template
    shutil.rmtree(gguf_files.unpacked_in())
    (file.parent / "tokenizer_config.json").write_text('{"chat_template": "another"}')
    (file.parent / "chat_template.jinja").write_text("another")
    assert tr.load(file).tokenizer.chat_template == alone == TEMPLATE


# Files that cannot be unpacked


@pytest.mark.parametrize("share", [0.001, 0.99])
def test_truncated_file_is_refused(file, share):
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * share)])
    assert_refused(file, f"cannot read {file}.*download it again")


@pytest.mark.parametrize(("number", "named"), [(999, "999"), (KINDS.Q8_1, "Q8_1")])
def test_unsupported_quantization_is_refused(file, number, named):
    """The file has a tensor of another ggml type."""
    content, name = bytearray(file.read_bytes()), b"blk.0.attn_q.weight"
    struct.pack_into("<I", content, content.index(name) + len(name) + 4 + 2 * 8, number)
    file.write_bytes(content)
    assert_refused(file, f"cannot read {file}: .*{named}")


def test_unsupported_architecture_is_refused(tmp_path):
    assert_refused(write(tmp_path / "tiny.gguf", architecture="rwkv6"), "rwkv6 is not supported")


def one_part(folder):
    writer = ggml.GGUFWriter(write(folder / "part.gguf"), "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_missing_gguf_package_is_reported(file, monkeypatch):
    found = extras.importlib.util.find_spec
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(ValueError, match="'gguf'"):
        tr.load(file)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("zip.gguf", lambda folder: (folder / "zip.gguf").write_bytes(b"PK"), "zip.gguf is not a GGUF file"),
        ("part.gguf", one_part, "3 parts"),
        (".", lambda folder: [(folder / f"{name}.gguf").touch() for name in "ab"], "a.gguf, b.gguf"),
        ("notes.txt", lambda folder: (folder / "notes.txt").touch(), "notes.txt is a file"),
        ("nowhere.gguf", lambda folder: None, "'.*nowhere.gguf'"),
    ],
)
def test_paths_without_a_model_are_refused(tmp_path, name, make, message):
    make(tmp_path)
    with pytest.raises(ValueError, match=message):
        tr.load(tmp_path / name)
    assert unpacked_folders() == []


# Folders


def test_folder_with_one_gguf_file_stands_for_the_file(file):
    folder = file.parent / "folder"
    folder.mkdir()
    file.rename(folder / "one.gguf")
    assert loading.resolved(str(folder)) == str(gguf_files.unpacked(folder / "one.gguf"))
    (folder / "config.json").write_text("{}")
    assert loading.resolved(str(folder)) == str(folder)


# Disks and other processes


def test_full_disk_leaves_no_partial_folder(file):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(ValueError, match="free disk space or set TOKEN_RECYCLING_CACHE"):
            gguf_files.unpacked(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert unpacked_folders() == []
    assert gguf_files.unpacked(file).is_dir(), "enough space again"


def test_concurrent_calls_unpack_once(file):
    """A second unpacking would replace the folder of the first."""

    def unpacked(_):
        folder = gguf_files.unpacked(file)
        return folder.stat().st_ino

    with ThreadPoolExecutor(4) as threads:
        assert len(set(threads.map(unpacked, range(4)))) == 1
