"""Every command accepts a GGUF file as model, with the same results as for the unpacked folder."""

import json

import pytest
from support import tiny
from support.commandline import assert_refused, run, run_json
from support.gguf_files import write_gguf

from token_recycling.model import gguf_files

PROMPT = "for index in range"
SHORT = ("--max-new-tokens", 12, "--drafter", "recycling:tree=4")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def shared_cache(monkeypatch, cache):
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(cache))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    tokenizer = tiny.tokenizer()
    merges = [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    model = tiny.llama(vocab_size=len(tokenizer), head_dim=8)
    write_gguf(model, path, tokenizer.convert_ids_to_tokens(range(len(tokenizer))), merges)
    return path


@pytest.fixture
def folder(file):
    return gguf_files.unpacked(file)


def test_gguf_file_is_unpacked_once_and_equals_its_folder(file, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    first, again, of_folder = (run("generate", model, PROMPT, *SHORT) for model in (file, file, folder))
    assert f"note: unpacking tiny.gguf into {tmp_path / 'gguf'}, in float32" in " ".join(first.stderr.split())
    assert "unpacking" not in again.stderr
    assert first.stdout == again.stdout == of_folder.stdout
    compared = run_json("compare", file, PROMPT, *SHORT)
    assert compared["summary"]["identical"]
    assert f"{compared['prompts'][0]['text']}\n" == first.stdout


def test_check_reads_no_weights(file, folder, monkeypatch, tmp_path):
    expected = run_json("check", folder)
    assert run_json("check", file, "--self-test")["difference"] is not None
    monkeypatch.setenv("TOKEN_RECYCLING_CACHE", str(tmp_path))
    assert run_json("check", file) == expected
    assert not gguf_files.is_unpacked(file)


def test_bench_names_its_folder_after_the_file(file, tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text(PROMPT)
    monkeypatch.chdir(tmp_path)
    methods = "generate", f"assisted:model={file}", f"draft_model:model={file},mode=sequence,depth=2"
    options = [part for method in methods for part in ("--method", method)]
    options += ["--data", "text.txt", "--max-new-tokens", 4, "--repeats", 1, "--no-replay"]
    found = run_json("bench", file, *options)
    assert found == {**found, "folder": "results/tiny", "rows": 3, "failures": 0, "different_outputs": 0}


def test_matrix_and_datastore_use_its_tokenizer(file, folder, tmp_path):
    matrix, texts = tmp_path / "a.matrix", tmp_path / "text.txt"
    texts.write_text("\n".join(tiny.SENTENCES))
    run_json("generate", file, PROMPT, *SHORT, "--matrix", matrix)
    shown = [run_json("matrix", matrix, "--model", model)["rows"] for model in (file, folder)]
    assert shown[0] == shown[1] != []
    assert shown[0][0]["text"] is not None
    built = [
        run_json("datastore", "build", texts, "--model", model, "--output", tmp_path / f"{place}.datastore")
        for place, model in enumerate((file, folder))
    ]
    assert built[0]["tokenizer"] == built[1]["tokenizer"]


def test_train_accepts_a_gguf_file(file, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(tiny.SENTENCES * 20))
    small = ["--texts", 8, "--prompt-tokens", 4, "--text-tokens", 8, "--steps", 2, "--batch", 2, "--held-out", 0.4]
    result = run("train", "medusa", file, tmp_path / "text.txt", "--output", tmp_path / "heads", *small)
    assert result.exit_code == 0, result.stderr
    refused = run("train", "specdec-pp", file, tmp_path / "text.txt", "--draft", file)
    assert_refused(refused, "--output is required", "tiny.gguf is not a folder")
