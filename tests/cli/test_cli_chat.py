"""`token-recycling chat` on a tiny random model: turns, commands, Ctrl-C, and piped input."""

import re
import shutil

import pytest
from support.commandline import CONTEXT, assert_refused, interrupt, run
from support.speaking import TEMPLATE

from token_recycling import Conversation
from token_recycling.cli.commands import chat as command
from token_recycling.model.loading import load

pytestmark = pytest.mark.core

FEW = ("--max-new-tokens", 8)


@pytest.fixture(scope="module")
def chatty_dir(tiny_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(tiny_model_dir, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def answers(folder, *said, **options):
    """Return the answers of a `Conversation` in Python."""
    loaded = load(str(folder))
    made = Conversation(loaded.model, loaded.tokenizer, max_new_tokens=8, do_sample=False, **options)
    return [made.say(text) for text in said]


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that types lines into `chat` as in a terminal; an exception is a key such as Ctrl-C."""

    def typed(*lines):
        left, prompts = iter(lines), []

        def read(prompt=""):
            prompts.append(prompt)
            line = next(left, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(command, "is_terminal", lambda: True)
        return prompts

    return typed


ONCE = "ab\n/reset\nab\n"
TURNS = [
    ("ab\n\n  \ncd\n", [("ab", "cd")], {}),
    ("a\\\nb\n", [("a\nb",)], {}),
    ("a\\\nb", [("a\nb",)], {}),
    ("/usr/bin\n", [("/usr/bin",)], {}),
    (ONCE, [("ab",), ("ab",)], {}),
    (ONCE, [("ab",), ("ab",)], {"system": "be brief"}),
]


def test_options_reach_the_conversation(chatty_dir, monkeypatch):
    given = {}

    def made(model, tokenizer, drafter, **options):
        given.update(options, reproducible=drafter.traits.isolates_requests)
        raise ValueError("no conversation")

    monkeypatch.setattr("token_recycling.hf.conversation.Conversation", made)
    how = ("--system", "be brief", "--fast", "off", "--no-prepack", "--reproducible")
    assert_refused(run("chat", chatty_dir, *how, *FEW), "no conversation")
    wanted = {"system": "be brief", "fast": False, "prepack": False, "reproducible": True}
    assert given == {**wanted, "max_new_tokens": 8, "do_sample": False}


@pytest.mark.parametrize(("typed", "conversations", "options"), TURNS)
def test_piped_lines_are_turns_without_prompts(chatty_dir, typed, conversations, options):
    """Empty lines are skipped, a backslash continues a line, a path is no command, /reset starts a new conversation."""
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    result = run("chat", chatty_dir, *FEW, *given, input=typed)
    assert result.exit_code == 0, result.stderr
    wanted = [answer for said in conversations for answer in answers(chatty_dir, *said, **options)]
    assert result.stdout == "".join(f"{answer}\n" for answer in wanted)
    assert result.stderr == ""


def test_exit_and_help_commands(chatty_dir):
    result = run("chat", chatty_dir, *FEW, input="/help\n/exit\nab\n")
    assert (result.exit_code, result.stdout) == (0, f"{command.HELP}\n")


def test_stats_compare_with_plain_decoding(chatty_dir):
    result = run("chat", chatty_dir, *FEW, input="ab\ncd\n/stats\n")
    assert result.exit_code == 0, result.stderr
    found = result.stdout
    assert int(re.search(r"prompt tokens in the cache\W+(\d+)", found).group(1)) > 10
    assert re.search(r" tokens \W+8 ", found)
    patterns = r"tokens per second\W+([\d.]+)", r"cache: ([\d.]+) tokens/s", r"speedup without prefill ([\d.]+)"
    decoding, plain, ratio = (float(re.search(pattern, found).group(1)) for pattern in patterns)
    assert ratio == pytest.approx(decoding / plain, abs=0.02 + 0.1 * ratio)
    assert "identical: yes" in found
    sampled = run("chat", chatty_dir, *FEW, "--temperature", 0.5, "--seed", 1, input="ab\n/stats\n").stdout
    assert "identical" not in sampled
    one = run("chat", chatty_dir, "--max-new-tokens", 1, input="ab\n/stats\n").stdout
    assert "mean accepted tokens" in one
    assert "speedup" not in one


def test_errors_are_single_lines_and_the_conversation_continues(chatty_dir):
    (answer,) = answers(chatty_dir, "ab")
    result = run("chat", chatty_dir, *FEW, input=f"/stats\n/frobnicate\n{'x' * CONTEXT}\nab\n")
    assert result.exit_code == 2
    assert result.stdout == f"{answer}\n"
    early, unknown, full = result.stderr.splitlines()
    assert early.startswith("error: /stats needs an answer")
    assert unknown == "error: commands are /help, /reset, /stats and /exit, got /frobnicate"
    assert f"context of {CONTEXT}" in full
    assert "/reset" in full


def test_full_conversation_can_be_reset(chatty_dir):
    result = run("chat", chatty_dir, "--max-new-tokens", 1000, input="ab\ncd\n/reset\nab\n")
    answer = result.stdout[: len(result.stdout) // 2]
    assert result.stdout == 2 * answer
    assert result.stderr.count("\n") == 1
    assert "/reset" in result.stderr


def test_terminal_shows_prompts_until_ctrl_d(chatty_dir, terminal):
    prompts = terminal("a\\", "b", "c\\", KeyboardInterrupt(), "/nothing")
    result = run("chat", chatty_dir, *FEW)
    assert result.exit_code == 0
    assert prompts == ["> ", "", "> ", "", "> ", "> "]
    (answer,) = answers(chatty_dir, "a\nb")
    assert answer in result.stdout
    assert "Ctrl-D" in result.stdout.splitlines()[0]
    assert "got /nothing" in result.stderr


def test_ctrl_c_stops_only_the_answer(chatty_dir, terminal, monkeypatch):
    interrupt(monkeypatch, 3)
    terminal("ab", "/stats", "/reset", "ab")
    result = run("chat", chatty_dir, "--max-new-tokens", 40)
    assert result.exit_code == 0, result.stderr
    length = int(re.search(r" tokens \W+(\d+) ", result.stdout).group(1))
    assert 0 < length < 40
    assert "identical: yes" in result.stdout
    loaded = load(str(chatty_dir))
    whole = Conversation(loaded.model, loaded.tokenizer, max_new_tokens=40, do_sample=False).say("ab")
    assert result.stdout.endswith(f"{whole}\n\n")


def test_ctrl_c_ends_piped_input(chatty_dir, monkeypatch):
    interrupt(monkeypatch, 3)
    assert run("chat", chatty_dir, "--max-new-tokens", 40, input="ab\nab\n").exit_code == 130


def test_piped_line_that_is_not_continued_is_answered(chatty_dir):
    wanted = run("chat", chatty_dir, *FEW, input="ab\n").stdout
    assert run("chat", chatty_dir, *FEW, input="ab\\").stdout == wanted != ""
