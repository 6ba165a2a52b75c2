"""The other commands, what is refused with one line, and that help answers at once."""

import shutil
import subprocess
import sys

import pytest
import torch
from support.commandline import CONTEXT, PROMPT, assert_refused, run, run_json
from transformers import RwkvConfig, T5Config, T5ForConditionalGeneration

from token_recycling import AdjacencyMatrix, Tree, __version__, fingerprint
from token_recycling.drafters._listing import busiest


@pytest.mark.parametrize("self_test", [False, True])
def test_check_says_how_a_model_is_supported(tiny_model_dir, self_test):
    options = ["--self-test"] * self_test
    text = run("check", tiny_model_dir, *options)
    assert text.exit_code == 0
    assert "LlamaForCausalLM, family llama" in text.stdout
    assert "one mask" in text.stdout
    found = run_json("check", tiny_model_dir, *options)
    assert found["supported"]
    assert found["tested"]
    assert found["reason"] is None
    assert (found["difference"] is not None) is self_test
    assert ("logits differ by" in text.stdout) is self_test
    assert "yes, on CUDA" not in text.stdout  # captured steps were not run


def test_check_says_why_a_model_is_refused(tmp_path):
    RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path / "rwkv")
    T5Config().save_pretrained(tmp_path / "t5")
    for name, reason in (("rwkv", "cannot roll back rejected tokens"), ("t5", "encoder-decoder")):
        text = run("check", tmp_path / name)
        assert text.exit_code == 1
        assert reason in text.stdout
        found = run_json("check", tmp_path / name, status=1)
        assert not found["supported"]
        assert reason in found["reason"]


def test_check_needs_a_model(tmp_path):
    assert_refused(run("check", tmp_path), "config.json")
    (tmp_path / "config.json").write_text("{}")
    assert_refused(run("check", tmp_path), "configuration")


# matrix and drafters


@pytest.fixture
def matrix_file(loaded, tmp_path):
    matrix = AdjacencyMatrix(257, 2)
    matrix.candidates[72] = torch.tensor([10, 72], dtype=torch.int32)
    matrix.candidates[10] = torch.tensor([72, 3], dtype=torch.int32)
    matrix.candidates[5] = torch.tensor([72, 9], dtype=torch.int32)
    matrix.save(tmp_path / "matrix.safetensors", fingerprint(loaded.tokenizer))
    return tmp_path / "matrix.safetensors"


def test_matrix_as_json(loaded, tiny_model_dir, matrix_file):
    found = run_json("matrix", matrix_file, "--model", tiny_model_dir, "--rows", 2)
    assert (found["vocab_size"], found["k"], found["rows_filled"], found["format_version"]) == (257, 2, 3, 6)
    assert found["tokenizer"] == fingerprint(loaded.tokenizer)
    assert found["bytes"] == matrix_file.stat().st_size
    assert [row["token"] for row in found["rows"]] == [72, 10]
    assert found["rows"][0]["candidates"] == [10, 72]
    assert found["rows"][0]["text"] == loaded.tokenizer.decode([72])
    assert found["rows"][0]["candidate_texts"] == [loaded.tokenizer.decode([10]), loaded.tokenizer.decode([72])]


def test_busiest_rows_are_filled_ones():
    matrix = AdjacencyMatrix(10, 2)
    assert busiest(matrix, 5) == []
    matrix.candidates[3] = torch.tensor([4, 5], dtype=torch.int32)
    assert busiest(matrix, 5) == [3]


def test_matrix_refusals(tiny_model_dir, matrix_file, tmp_path):
    assert_refused(run("matrix", tmp_path / "none"), "there is no matrix file")
    assert_refused(run("matrix", matrix_file, "--token", "abc"), "--model")
    assert_refused(run("matrix", matrix_file, "--token", "257"), "0 to 256")
    assert_refused(run("matrix", matrix_file, "--model", tmp_path / "none"), "no folder")
    AdjacencyMatrix(257, 2).save(tmp_path / "other", "0123456789abcdef")
    assert_refused(run("matrix", tmp_path / "other", "--model", tiny_model_dir), "tokenizer 0123456789abcdef")
    (tmp_path / "broken").write_bytes(matrix_file.read_bytes()[:40])
    assert_refused(run("matrix", tmp_path / "broken"), "broken")


def test_one_drafter_is_listed_by_its_name():
    assert [one["name"] for one in run_json("drafters", "suffix", "plain")["drafters"]] == ["suffix", "plain"]
    assert_refused(run("drafters", "sufix"), "unknown drafter", "suffix", "'sufix'")


def test_drafters_are_listed_from_their_classes():
    found = {drafter["name"]: drafter for drafter in run_json("drafters")["drafters"]}
    assert found["plain"]["options"] == []
    assert found["plain"]["summary"] == "Drafts nothing."
    options = {option["name"]: option for option in found["published"]["options"]}
    assert options["k"] == {"name": "k", "type": "int", "default": "8", "summary": "Candidates kept after every token."}
    assert options["update"]["type"] == "last | first | unordered"
    assert {one["name"]: one["type"] for one in found["recycling"]["options"]}["tree"] == "str | int"
    assert options["tree"]["summary"].endswith("or a file of them.")
    assert "matrix" not in options
    text = run("drafters").stdout
    assert "recycling" in text
    assert "Candidates kept" in text


# refusals


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["MODEL", ""], "empty"),
        (["MODEL", " \n"], "empty"),
        (["MODEL"], "empty"),
        (["MODEL", "x" * CONTEXT], f"context of {CONTEXT}"),
        (["MODEL", "hi", "--file", "also"], "cannot be combined"),
        (["MODEL", "--file", "nowhere.txt"], "there is no file or folder nowhere.txt"),
        (["MODEL", "--file", "."], "folder"),
        (["MODEL", "hi", "--drafter", "guess"], "'guess'"),
        (["MODEL", "hi", "--drafter", "recycling:size=3"], "no option 'size'"),
        (["MODEL", "hi", "--drafter", "recycling:k=many"], "got 'many'"),
        (["MODEL", "hi", "--drafter", "published:update=newest"], "newest"),
        (["MODEL", "hi", "--drafter", "recycling:tree=oak"], "oak"),
        (["MODEL", "hi", "--drafter", "published:k=2,tree=paper"], "k=2"),
        (["MODEL", "hi", "--dtype", "int3"], "int3"),
        (["MODEL", "hi", "--device", "abacus"], "abacus"),
        (["MODEL", "hi", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["MODEL", "hi", "--temperature", "-1"], "--temperature"),
        (["MODEL", "hi", "--top-k", "5"], "--temperature > 0"),
        (["MODEL", "hi", "--fast"], "--fast"),
        ([], "MODEL"),
        (["./nowhere", "hi"], "./nowhere"),
        (["tests/nowhere", "hi"], "tests/nowhere"),
        (["pyproject.toml", "hi"], "is a file"),
    ],
)
def test_generate_refuses(arguments, word, tiny_model_dir):
    assert_refused(run("generate", *(tiny_model_dir if one == "MODEL" else one for one in arguments)), word)


def test_compare_refuses(tiny_model_dir, tmp_path):
    assert_refused(run("compare", tiny_model_dir, "--prompts", tmp_path), "no prompt files")
    (tmp_path / "empty.py").write_text("\n")
    assert_refused(run("compare", tiny_model_dir, "--prompts", tmp_path), "empty.py")
    (tmp_path / "empty.py").write_bytes(b"\xff\xfe")
    assert_refused(run("compare", tiny_model_dir, "--prompts", tmp_path), "UTF-8")
    assert_refused(run("compare", tiny_model_dir, "hi", "--limit", 0), "--limit")


def test_two_drafters_are_refused(tiny_model_dir):
    for command in (["generate", tiny_model_dir, "hi"], ["compare", tiny_model_dir, "hi"], ["chat", tiny_model_dir]):
        assert_refused(run(*command, "--drafter", "suffix", "--drafter=plain"), "--drafter", "2 times")


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available")
@pytest.mark.parametrize(("build", "words"), [(None, ("without CUDA", "pip install torch")), ("13.0", ("nvidia-smi",))])
def test_a_device_that_is_not_available_says_why(tiny_model_dir, monkeypatch, build, words):
    monkeypatch.setattr(torch.version, "cuda", build)
    for command in (["generate", tiny_model_dir, "hi"], ["check", tiny_model_dir, "--self-test"]):
        assert_refused(run(*command, "--device", "cuda"), "'cuda'", *words)
    assert_refused(run("generate", tiny_model_dir, "hi", "--device", "cpu:1"), "cpu:1")


def test_unusable_models_are_refused(tiny_model_dir, tmp_path):
    assert_refused(run("generate", tmp_path, "hi"), "config.json")
    weightless = tmp_path / "weightless"
    shutil.copytree(tiny_model_dir, weightless)
    (weightless / "model.safetensors").unlink()
    assert_refused(run("generate", weightless, "hi"), "weightless")
    (weightless / "config.json").write_text("{")
    assert_refused(run("generate", weightless, "hi"), "weightless")
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=257, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )
    t5.save_pretrained(tmp_path / "t5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{tiny_model_dir}/{name}", tmp_path / "t5")
    assert_refused(run("generate", tmp_path / "t5", "hi"), "T5")


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch):
    import huggingface_hub

    def no_network(self, name, timeout):
        raise OSError(f"cannot be reached\nfor {name} within {timeout} s")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    assert_refused(run("generate", "somebody/some-model", "hi"), "somebody/some-model", "cannot be reached")


# the program


def test_version_and_help():
    assert run("--version").stdout == f"token-recycling {__version__}\n"
    assert "compare" in run().stdout
    assert "--temperature" in run("generate", "--help").stdout


def test_help_wrong_usage_and_completion_answer_at_once():
    """They do not wait for torch and transformers, which are imported by the commands that need them."""
    code = "import sys, token_recycling.cli.app; from token_recycling.cli.options import completed_drafters; "
    code += "completed_drafters(''); print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_a_template_given_as_paths(tiny_model_dir):
    found = run_json("generate", tiny_model_dir, PROMPT, "--drafter", "recycling:tree=0 1 00", "--max-new-tokens", 10)
    assert repr(Tree.from_paths([(0,), (1,), (0, 0)])) in found["stats"]["drafter"]
