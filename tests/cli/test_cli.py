"""Other commands, shell completion, fast help, and prepacked weights."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cases import thinned
from support.commandline import PROMPT, run, run_json
from transformers import RwkvConfig, T5Config

from token_recycling import __version__, drafter_names, fingerprint
from token_recycling.bench import methods, session
from token_recycling.bench.data import OWN_METHODS
from token_recycling.cli.console import percent
from token_recycling.drafters.published import AdjacencyMatrix
from token_recycling.model import prepacking

MODELS = Path(__file__).parents[2] / "models"


@pytest.mark.parametrize("self_test", [False, True])
def test_check_describes_a_supported_model(tiny_model_dir, self_test):
    options = ["--self-test"] * self_test
    text = run("check", tiny_model_dir, *options)
    assert text.exit_code == 0
    assert "LlamaForCausalLM, family llama" in text.stdout
    found = run_json("check", tiny_model_dir, *options)
    assert (found["supported"], found["tested"], found["reason"]) == (True, True, None)
    assert (found["difference"] is not None) == ("logits differ by" in text.stdout) == self_test
    assert not found["notes"]


def test_check_notes_that_the_configuration_names_another_class():
    (note,) = run_json("check", MODELS / "eagle")["notes"]
    assert "LlamaForCausalLMEagle" in note


def test_check_states_why_a_model_is_unsupported(tmp_path):
    RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path / "rwkv")
    T5Config().save_pretrained(tmp_path / "t5")
    for name, reason in (("rwkv", "cannot roll back rejected tokens"), ("t5", "encoder-decoder")):
        text = run("check", tmp_path / name)
        assert text.exit_code == 1
        assert reason in text.stdout
        found = run_json("check", tmp_path / name, status=1)
        assert not found["supported"]
        assert reason in found["reason"]


def test_matrix_shows_the_most_used_rows(loaded, tiny_model_dir, tmp_path):
    matrix, file = AdjacencyMatrix(257, 2), tmp_path / "matrix.safetensors"
    for token, candidates in ((72, [10, 72]), (10, [72, 3]), (0, [72, 9])):
        matrix.candidates[token] = torch.tensor(candidates, dtype=torch.int32)
    matrix.save(file, fingerprint(loaded.tokenizer))
    found = run_json("matrix", file, "--model", tiny_model_dir, "--rows", 2)
    matrix.save(file)
    assert run_json("matrix", file, "--model", tiny_model_dir, "--rows", 2)["rows"] == found["rows"]
    assert (found["vocab_size"], found["k"], found["rows_filled"]) == (257, 2, 3)
    assert found["tokenizer"] == fingerprint(loaded.tokenizer)
    assert [row["token"] for row in found["rows"]] == [72, 10]
    assert {row["token"] for row in run_json("matrix", file)["rows"]} == {72, 10, 0}, "no empty rows"
    assert found["rows"][0]["candidates"] == [10, 72]
    assert found["rows"][0]["text"] == loaded.tokenizer.decode([72])
    assert found["rows"][0]["candidate_texts"] == [loaded.tokenizer.decode([10]), loaded.tokenizer.decode([72])]


def test_drafters_are_listed_from_their_classes():
    assert [one["name"] for one in run_json("drafters", "suffix", "plain")["drafters"]] == ["suffix", "plain"]
    found = {drafter["name"]: drafter for drafter in run_json("drafters")["drafters"]}
    assert found["plain"]["options"] == []
    options = {option["name"]: option for option in found["published"]["options"]}
    assert options["k"] == {"name": "k", "type": "int", "default": "8", "summary": "Candidates kept per token."}
    assert options["update"]["type"] == "last | first | unordered"
    assert {one["name"]: one["type"] for one in found["recycling"]["options"]}["tree"] == "str | int"
    assert "Candidates kept" in run("drafters").stdout


# The program


def test_version_and_help_import_no_heavy_packages():
    """Only the commands that need torch and transformers import them."""
    version = run("--version").stdout
    assert version == f"token-recycling {__version__}\n"
    assert "compare" in run().stdout
    assert "--temperature" in run("generate", "--help").stdout
    code = "import sys, token_recycling.cli.app; from token_recycling.cli.options import completed_drafters; "
    code += "completed_drafters(''); print({'torch', 'transformers', 'numpy', 'pandas'} & set(sys.modules))"
    for command, said in ((["-c", code], "set()\n"), (["-m", "token_recycling", "--version"], version)):
        found = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
        assert found.stdout == said


def completions(line):
    """Return the completions that zsh is offered after a line of `token-recycling`."""
    asked = {"_TOKEN_RECYCLING_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": f"token-recycling {line}"}
    offered = run(prog_name="token-recycling", env=asked).stdout
    return re.findall(r'^(?:_arguments .*\(\()?"(.*?)"', offered, re.MULTILINE)


def test_shell_completes_names():
    for command in ("generate m --drafter ", "compare m --drafter ", "serve m --offer "):
        assert completions(command) == drafter_names()
    assert completions("generate m --drafter l") == ["layer_skip", "lookahead"]
    assert completions("bench m --method ") == [*OWN_METHODS, *drafter_names()]
    assert set(OWN_METHODS) == set(methods._NAMED)
    assert completions("train me") == ["medusa"]
    assert completions("generate --dr") == ["--drafter"]


# Weights prepacked for the processor, once per command

COMMANDS = {
    "generate": (PROMPT,),
    "compare": (PROMPT, "import os", "--dtype", "float32"),
    "bench": (
        *("--method", "recycling:tree=4", "--method", "suffix", "--data", "DATA", "--output", "ROWS"),
        *("--repeats", "1", "--no-replay"),
    ),
}


CASES = [(command, (), [False]) for command in COMMANDS]
CASES += [("compare", ("--no-prepack",), []), ("bench", ("--no-prepack",), [])]
CASES += [("generate", ("--no-prepack",), []), ("generate", ("--reproducible",), [True])]


@pytest.mark.parametrize(("command", "given", "fixed"), thinned(CASES, kept=lambda case: case[0] != "bench"))
def test_weights_are_prepacked_once_per_command(command, given, fixed, tiny_model_dir, tmp_path, monkeypatch):
    made = []
    session._loaded.cache_clear()  # an earlier test of this process may have loaded the model

    class Counted(prepacking.Prepacked):
        def __init__(self, modules, fixed=False):
            made.append(fixed)
            super().__init__(modules, fixed)

    monkeypatch.setattr(prepacking, "_LEAST_BYTES", 0)
    monkeypatch.setattr(prepacking, "Prepacked", Counted)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    places = {"DATA": tmp_path / "prompt.txt", "ROWS": tmp_path / "rows"}
    options = [places.get(one, one) for one in COMMANDS[command]]
    result = run(command, tiny_model_dir, *options, "--max-new-tokens", 4, *given)
    assert result.exit_code == 0, result.stderr
    assert made == fixed


@pytest.mark.parametrize(("share", "shown"), [(0, "0%"), (0.004, "0.4%"), (0.0996, "10.0%"), (0.1, "10%"), (1, "100%")])
def test_small_shares_keep_a_decimal(share, shown):
    assert percent(share) == shown
