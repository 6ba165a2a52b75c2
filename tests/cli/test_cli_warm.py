"""`token-recycling warm`: a file is kept, and later texts begin with it."""

import pytest
from support.commandline import PROMPT, assert_refused, run, run_json

import token_recycling.hf.warm as warm_module


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(warm_module, "_ANSWER", 20)


def test_what_the_model_taught_is_kept_and_used(tiny_model_dir, tmp_path):
    file = tmp_path / "warm.matrix"
    found = run_json("warm", tiny_model_dir, "--minutes", 0.02, "--output", file)
    assert file.is_file()
    assert (found["file"], found["texts"] > 0, found["tokens"] > 0) == (str(file), True, True)
    cold = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40)
    assert run("warm", tiny_model_dir, "--minutes", 0.02).exit_code == 0
    warm = run_json("generate", tiny_model_dir, PROMPT, "--max-new-tokens", 40, "--drafter", "recycling:warmed=true")
    assert warm["tokens"] == cold["tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--minutes", 0), "--minutes must be > 0, got 0"),
        (("--output", "."), "--output must be a file, got the folder ."),
        (("--drafter", "suffix"), "drafter suffix"),
    ],
)
def test_what_is_refused(tiny_model_dir, options, message):
    assert_refused(run("warm", tiny_model_dir, *options), message)
