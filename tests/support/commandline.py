"""Command line in tests: run it, read its JSON, expect a one-line error."""

import functools
import json

import typer.testing

from token_recycling.cli.app import app

PROMPT = "def add(a, b):"
CONTEXT = 96
# typer would build all commands again for every call.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def run(*args, **extra):
    return typer.testing.CliRunner().invoke(app, list(map(str, args)), **extra)


def run_json(*args, status=0, **extra):
    result = run(*args, "--json", **extra)
    assert result.exit_code == status, result.stderr
    return json.loads(result.stdout)


def assert_refused(result, *words):
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def reference(loaded, prompt, **arguments):
    ids = loaded.tokenizer(prompt, return_tensors="pt")
    return loaded.model.generate(**ids, **arguments)[0, ids["input_ids"].shape[1] :].tolist()


def interrupt(monkeypatch, draft):
    """Simulate Ctrl-C at the given draft of the next sequence, once."""
    from token_recycling.drafters.recycling import (
        RecyclingSequence,  # imports numba, which must not be loaded before vLLM starts
    )

    usual, calls = RecyclingSequence.draft, []

    def draft_or_interrupt(self, context):
        calls.append(context)
        if len(calls) == draft:
            raise KeyboardInterrupt
        return usual(self, context)

    monkeypatch.setattr(RecyclingSequence, "draft", draft_or_interrupt)
