"""`--prepack` and `--no-prepack`: weights are laid out as the user says, once for all calls of a command."""

import pytest
from support.commandline import PROMPT, run

from token_recycling.bench.run import session
from token_recycling.model import prepacking

ASKED = {
    "generate": (PROMPT, "--max-new-tokens", 4),
    "compare": (PROMPT, "import os", "--max-new-tokens", 4, "--dtype", "float32"),
    "bench": ("--method", "recycling:tree=4", "--method", "suffix", "--max-new-tokens", 4),
}


@pytest.fixture
def layings(monkeypatch):
    """How weights were laid out: whether that was fixed."""
    made = []
    session._loaded.cache_clear()  # an earlier test of this process may have loaded the model

    class Counted(prepacking.Prepacked):
        def __init__(self, modules, fixed=False):
            made.append(fixed)
            super().__init__(modules, fixed)

    monkeypatch.setattr(prepacking, "_LEAST_BYTES", 0)
    monkeypatch.setattr(prepacking, "Prepacked", Counted)
    return made


def asked(command, folder, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(PROMPT)
    more = ("--data", prompt, "--output", tmp_path / "rows") if command == "bench" else ()
    return command, folder, *ASKED[command], *more


@pytest.mark.parametrize("command", ASKED)
def test_weights_are_laid_out_once_for_a_command(command, tiny_model_dir, tmp_path, layings):
    result = run(*asked(command, tiny_model_dir, tmp_path))
    assert result.exit_code == 0, result.stderr
    assert layings == [False]


@pytest.mark.parametrize("command", ASKED)
def test_weights_are_not_laid_out_where_the_user_says_so(command, tiny_model_dir, tmp_path, layings):
    result = run(*asked(command, tiny_model_dir, tmp_path), "--no-prepack")
    assert result.exit_code == 0, result.stderr
    assert not layings


def test_nothing_is_measured_where_texts_are_to_be_reproducible(tiny_model_dir, tmp_path, layings):
    assert run(*asked("generate", tiny_model_dir, tmp_path), "--reproducible").exit_code == 0
    assert layings == [True]
