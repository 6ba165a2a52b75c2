"""`token-recycling chat`: converse in the terminal, one line per turn."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ..._util.options import SWITCH
from .. import console, running
from ..options import DecodingOptions, ModelOptions, SamplingOptions

if TYPE_CHECKING:
    from ...hf.conversation import Conversation, Turn

PROMPT = "> "
HELP = """\
/reset  start a new conversation
/stats  show statistics of the last answer, and decode it without drafts to compare
/help   show this help
/exit   exit, like Ctrl-D
Ctrl-C stops an answer. A line that ends in \\ continues on the next line."""


def chat(
    model: ModelOptions,
    system: Annotated[str | None, typer.Option(help="System message; default that of the template.")] = None,
    decoding: DecodingOptions = DecodingOptions(max_new_tokens=512),
    sampling: SamplingOptions = SamplingOptions(),
) -> None:
    """Chat with the model: every line of input is a turn, and answers stream. /help lists the commands."""
    choosing = sampling.arguments()
    drafter, loaded = running.drafter_and_model(decoding.drafter, model, sampling.reproducible)
    from ...hf.conversation import Conversation

    arguments = {"max_new_tokens": decoding.max_new_tokens, "do_sample": False, **choosing}
    conversation = Conversation(
        loaded.model,
        loaded.tokenizer,
        drafter,
        system=system,
        fast=SWITCH[decoding.fast],
        prepack=model.prepack,
        **arguments,
    )
    on_terminal, failed = is_terminal(), False
    if on_terminal:
        print("/help lists the commands, Ctrl-D exits")
    for line in turns(on_terminal):
        if line == "/exit":
            break
        try:
            _take(conversation, line)
        except KeyboardInterrupt:
            if not on_terminal:
                raise
            print()
        except ValueError as error:
            console.report(error)
            failed = True
    if failed and not on_terminal:
        raise typer.Exit(2)


def is_terminal() -> bool:
    """Return whether input comes from a terminal."""
    return sys.stdin.isatty()


def turns(on_terminal: bool) -> Iterator[str]:
    """Yield turns up to the end of the input; show a prompt only on a terminal."""
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # lets `input` edit lines and recall earlier ones
    begun = ""
    while True:
        try:
            line = input(PROMPT if on_terminal and not begun else "").rstrip("\r")
        except (KeyboardInterrupt, EOFError) as end:
            if on_terminal:
                print()
            elif isinstance(end, KeyboardInterrupt):
                raise
            elif begun.strip():
                yield begun.strip()
            if isinstance(end, EOFError):
                return
            begun = ""
            continue
        if line.endswith("\\"):
            begun += f"{line[:-1]}\n"
            continue
        turn, begun = (begun + line).strip(), ""
        if turn:
            yield turn


def _take(conversation: Conversation, line: str) -> None:
    """Handle one turn: a command, or a question whose answer streams."""
    if line == "/help":
        print(HELP)
    elif line == "/reset":
        conversation.reset()
    elif line == "/stats":
        if conversation.last is None:
            raise ValueError("/stats needs an answer, got none yet; ask something first")
        _print_stats(conversation, conversation.last)
    elif line[0] == "/" and line[1:].isalpha():
        raise ValueError(f"commands are /help, /reset, /stats and /exit, got {line}")
    else:
        with contextlib.ExitStack() as waiting:

            def show(piece: str) -> None:
                waiting.close()
                print(piece, end="", flush=True)

            waiting.enter_context(console.working("reading"))
            conversation.say(line, show)
        print()


def _print_stats(conversation: Conversation, turn: Turn) -> None:
    """Print statistics of the last answer, and decode the same prompt with transformers' own `generate`."""
    from ...bench.data import BASELINE
    from ...bench.methods import Call, parse

    console.print_stats(Console(), turn.stats, conversation.model.device)
    if not turn.stats.tokens_per_second:
        return  # the first step emitted the whole answer
    with console.working("decoding the same prompt without drafts"):
        asked = {**turn.arguments, "max_new_tokens": len(turn.tokens)}  # the same length, even if it was interrupted
        plain = parse(BASELINE).decode(conversation.model, Call(asked))
    (tokens,), rate = plain.tokens, plain.tokens_per_second
    if rate:
        same = "" if asked["do_sample"] else f"; identical: {'yes' if tokens == turn.tokens else 'no'}"
        ratio = f"{turn.stats.tokens_per_second / rate:.2f}"
        print(f"transformers' generate from an empty cache: {rate:.1f} tokens/s; speedup without prefill {ratio}{same}")
