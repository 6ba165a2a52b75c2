"""A model with readable outputs, a tokenizer with a chat template, and their server, for tests that change neither.

Imports are local because the core tests run without the packages of a server's clients.
"""

import time

import pytest
from support import tiny


@pytest.fixture(scope="session")
def model():
    from support.speaking import ascii_llama

    return ascii_llama()


@pytest.fixture(scope="session")
def slow():
    """A model that is slow on every machine, so that long outputs take long."""
    from support.noting import own
    from support.speaking import ascii_llama

    model = ascii_llama()
    model.register_forward_pre_hook(own(lambda *args: time.sleep(0.004)))
    return model


@pytest.fixture(scope="session")
def tokenizer():
    from support.speaking import chat_tokenizer

    return chat_tokenizer()


@pytest.fixture(scope="session")
def server(model, tokenizer):
    from support.serving import serving

    with serving(model, tokenizer) as running:
        yield running


@pytest.fixture
def served(model, tmp_path, monkeypatch):
    """Run `serve` on the model's folder until it would listen; return the arguments of the call that would serve."""
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
