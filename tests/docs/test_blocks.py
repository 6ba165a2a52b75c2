"""The code of README.md, CONTRIBUTING.md and docs/ runs unchanged.

The Python blocks of a page run in order, in one namespace, in a folder with the repository's models. `model` and
`tokenizer` are predefined, as in the README. A block that cannot run here has the reason in a comment before it:
`<!-- not run: it needs vLLM -->`. Command lines are parsed with their options.
"""

import shlex

import pytest
import typer
from support.pages_of_docs import PAGES, ROOT, blocks, name
from transformers import AutoModelForCausalLM, AutoTokenizer

from token_recycling.cli.app import app
from token_recycling.drafters._registry import check_spec

MODEL = ROOT / "models" / "target"


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """Predefined names; the current folder is empty except for the models."""
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    return {"__name__": "__main__", "model": model, "tokenizer": AutoTokenizer.from_pretrained(MODEL)}


# Blocks of ecosystem.md run in tests/ecosystem, with its libraries.
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page.stem != "ecosystem"], ids=name
)
def test_python_runs(page, namespace):
    ran = [block for block in blocks(page, "python") if block.reason is None]
    for block in ran:
        # Line numbers of errors are those of the page.
        exec(compile("\n" * (block.line - 1) + block.code, page, "exec"), namespace)


def test_few_blocks_are_not_run():
    left_out = [(name(page), block.reason) for page in PAGES for block in blocks(page, "python") if block.reason]
    assert len(left_out) <= 12, left_out
    assert all(len(reason) > 15 for _, reason in left_out)


def commands(page):
    """Yield the command lines of the page, each as a list of words."""
    for block in blocks(page, "console"):
        for line in block.code.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                yield shlex.split(line[2:], comments=True)


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=name)
def test_command_lines_are_valid(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    known = "token_recycling.cli.options.check_spec"  # bigram is the example of a new drafter
    monkeypatch.setattr(known, lambda spec: spec.startswith("bigram:") or check_spec(spec))
    group = typer.main.get_command(app)
    targets = (ROOT / "Makefile").read_text(encoding="utf-8")
    for words in commands(page):
        if words[0] == "token-recycling":
            parse(group, words[1:])
        else:
            assert words[0] == "make", words
            assert f"\n{words[1]}:" in targets, words


def parse(command, words):
    """Parse words as the command line does, without running anything."""
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context(command.name, words)
