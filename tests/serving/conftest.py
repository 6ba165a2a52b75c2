"""One model that speaks, its tokenizer with a chat template, and a server of both for all tests that change neither.

Imported where they are used: the core tests run where no client of a server is installed.
"""

import pytest
from support import tiny


@pytest.fixture(scope="session")
def model():
    from support.speaking import speaking_llama

    return speaking_llama()


@pytest.fixture(scope="session")
def tokenizer():
    from support.speaking import chatty

    return chatty(tiny.tokenizer())


@pytest.fixture(scope="session")
def server(model, tokenizer):
    from support.serving import serving

    with serving(model, tokenizer) as running:
        yield running


@pytest.fixture
def served(model, tmp_path, monkeypatch):
    """Runs `serve` on the model's folder up to where it would listen; gives the result and what would be served."""
    from support.commandline import run

    made = []
    monkeypatch.setattr("token_recycling.cli.commands.serve._run", lambda *arguments: made.append(arguments))
    model.save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)

    def served(*options):
        result = run("serve", tmp_path, "--port", 0, "--max-prompt-tokens", 8, *options)
        assert result.exit_code == 0, result.stderr
        return made[0]

    return served
