"""What a shell meets: `python -m`, completion, wrong names, and `-` for standard input."""

import re
import subprocess
import sys

import pytest
from support.commandline import PROMPT, assert_refused, run, run_json

from token_recycling import __version__, drafter_names
from token_recycling.bench.run import methods
from token_recycling.bench.scenario import OWN_METHODS


def completed(line):
    """What zsh is offered after a line of the command `token-recycling`."""
    asked = {"_TOKEN_RECYCLING_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": line}
    offered = run(prog_name="token-recycling", env=asked).stdout
    return re.findall(r'^(?:_arguments .*\(\()?"(.*?)"', offered, re.MULTILINE)


def test_it_runs_as_a_module():
    found = subprocess.run([sys.executable, "-m", "token_recycling", "--version"], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, f"token-recycling {__version__}\n")


def test_drafters_are_completed():
    for command in ("generate m --drafter ", "compare m --drafter ", "serve m --offer "):
        assert completed(f"token-recycling {command}") == drafter_names()
    assert completed("token-recycling generate m --drafter l") == ["layer_skip", "lookahead"]


def test_methods_are_completed():
    assert completed("token-recycling bench m --method ") == [*OWN_METHODS, *drafter_names()]
    assert set(OWN_METHODS) == set(methods._NAMED)


def test_commands_and_options_are_completed():
    assert completed("token-recycling tr") == ["train"]
    assert completed("token-recycling train me") == ["medusa"]
    assert completed("token-recycling generate --dr") == ["--drafter"]


@pytest.mark.parametrize(
    ("wrong", "meant"), [(["generat"], "generate"), (["checks"], "check"), (["train", "medus"], "medusa")]
)
def test_unknown_commands_suggest_the_nearest(wrong, meant):
    assert_refused(run(*wrong), f"No such command '{wrong[-1]}'", f"Did you mean '{meant}'?")


def test_a_dash_is_standard_input(tiny_model_dir, tmp_path):
    said, options = f"{PROMPT}\n", ("--max-new-tokens", 12)
    wanted = run_json("generate", tiny_model_dir, PROMPT, *options)["tokens"]
    (tmp_path / "prompt.py").write_text(said)
    assert run_json("generate", tiny_model_dir, "--file", tmp_path / "prompt.py", *options)["tokens"] == wanted
    for given in ([], ["-"], ["--file", "-"]):
        assert run_json("generate", tiny_model_dir, *given, *options, input=said)["tokens"] == wanted
    for given in (["-"], ["--prompts", "-"]):
        (found,) = run_json("compare", tiny_model_dir, *given, *options, input=said)["prompts"]
        assert (found["name"], [token for step in found["steps"] for token in step]) == ("standard input", wanted)
    first, second = run_json("compare", tiny_model_dir, "a", "-", *options, input=said)["prompts"]
    assert (first["name"], second["name"]) == ("argument 1", "standard input")


def test_a_datastore_is_built_from_standard_input(tiny_model_dir, tmp_path):
    text, options = f"{PROMPT}\n", ("--model", tiny_model_dir, "--output", tmp_path / "store")
    (tmp_path / "text.py").write_text(text)
    wanted = run_json("datastore", "build", tmp_path / "text.py", *options)
    assert run_json("datastore", "build", "-", *options, input=text) == wanted


def test_an_empty_standard_input_is_refused(tiny_model_dir):
    assert_refused(run("generate", tiny_model_dir, "-", input="\n"), "empty", "standard input")
