"""`token-recycling chat` on a tiny random model: turns, its commands, Ctrl-C, and input that is no terminal."""

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
    """What a conversation in Python says."""
    loaded = load(str(folder))
    made = Conversation(loaded.model, loaded.tokenizer, max_new_tokens=8, do_sample=False, **options)
    return [made.say(text) for text in said]


@pytest.fixture
def terminal(monkeypatch):
    """Lets `chat` meet a person who types these lines; an exception is a key such as Ctrl-C."""

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


def test_lines_of_a_pipe_are_turns_and_no_prompts_are_printed(chatty_dir):
    result = run("chat", chatty_dir, *FEW, input="ab\n\n  \ncd\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "".join(f"{answer}\n" for answer in answers(chatty_dir, "ab", "cd"))
    assert result.stderr == ""


def test_a_line_that_ends_in_a_backslash_goes_on(chatty_dir):
    (wanted,) = answers(chatty_dir, "a\nb")
    assert run("chat", chatty_dir, *FEW, input="a\\\nb\n").stdout == f"{wanted}\n"
    assert run("chat", chatty_dir, *FEW, input="a\\\nb").stdout == f"{wanted}\n"


def test_reset_and_system(chatty_dir):
    (once,) = answers(chatty_dir, "ab", system="be brief")
    options = (*FEW, "--system", "be brief")
    assert run("chat", chatty_dir, *options, input="ab\n/reset\nab\n").stdout == f"{once}\n{once}\n"
    assert answers(chatty_dir, "ab") != [once]


def test_exit_ends_and_help_says_so(chatty_dir):
    result = run("chat", chatty_dir, *FEW, input="/help\n/exit\nab\n")
    assert result.exit_code == 0
    assert result.stdout == f"{command.HELP}\n"


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
    drawn = run("chat", chatty_dir, *FEW, "--temperature", 0.5, "--seed", 1, input="ab\n/stats\n").stdout
    assert "identical" not in drawn
    one = run("chat", chatty_dir, "--max-new-tokens", 1, input="ab\n/stats\n").stdout
    assert "mean accepted tokens" in one
    assert "speedup" not in one


def test_errors_are_lines_and_the_conversation_goes_on(chatty_dir):
    (answer,) = answers(chatty_dir, "ab")
    result = run("chat", chatty_dir, *FEW, input=f"/stats\n/frobnicate\n{'x' * CONTEXT}\nab\n")
    assert result.exit_code == 2
    assert result.stdout == f"{answer}\n"
    early, unknown, full = result.stderr.splitlines()
    assert early.startswith("error: /stats needs an answer")
    assert unknown == "error: commands are /help, /reset, /stats and /exit, got /frobnicate"
    assert f"context of {CONTEXT}" in full
    assert "/reset" in full


def test_a_full_conversation_can_be_reset(chatty_dir):
    result = run("chat", chatty_dir, "--max-new-tokens", 1000, input="ab\ncd\n/reset\nab\n")
    answer = result.stdout[: len(result.stdout) // 2]
    assert result.stdout == 2 * answer
    assert result.stderr.count("\n") == 1
    assert "/reset" in result.stderr


def test_a_path_is_no_command(chatty_dir):
    (answer,) = answers(chatty_dir, "/usr/bin")
    assert run("chat", chatty_dir, *FEW, input="/usr/bin\n").stdout == f"{answer}\n"


def test_a_terminal_has_prompts_and_ctrl_d_ends(chatty_dir, terminal):
    prompts = terminal("a\\", "b", KeyboardInterrupt(), "/nothing")
    result = run("chat", chatty_dir, *FEW)
    assert result.exit_code == 0
    assert prompts == ["> ", "", "> ", "> ", "> "]
    (answer,) = answers(chatty_dir, "a\nb")
    assert answer in result.stdout
    assert "Ctrl-D" in result.stdout.splitlines()[0]
    assert "got /nothing" in result.stderr


def test_ctrl_c_stops_the_answer_and_not_the_program(chatty_dir, terminal, monkeypatch):
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


def test_ctrl_c_ends_a_pipe(chatty_dir, monkeypatch):
    interrupt(monkeypatch, 3)
    assert run("chat", chatty_dir, "--max-new-tokens", 40, input="ab\nab\n").exit_code == 130


def test_fast_makes_captured_steps(chatty_dir):
    plain, fast = (
        run("chat", chatty_dir, "--max-new-tokens", 8, "--fast", how, input="ab\n/stats\n") for how in ("off", "on")
    )
    assert fast.exit_code == 0
    assert fast.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert "constant shapes" in fast.stdout
    assert "constant shapes" not in plain.stdout


def test_refusals(tiny_model_dir, chatty_dir):
    assert_refused(run("chat", tiny_model_dir, input="ab\n"), "chat template", "`generate`")
    assert_refused(run("chat", chatty_dir, "--top-k", 3, input="ab\n"), "--temperature > 0")
    assert_refused(run("chat", chatty_dir, "--drafter", "guess", input="ab\n"), "'guess'")
