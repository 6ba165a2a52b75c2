"""What the command line shows a person: errors in one line, spinners, and statistics, steps and rows as rich text.

Results go to standard output; whatever is only for the person at the terminal goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from ..text_stream import one_line

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

    from ..model.support import Support
    from ..stats import Stats
    from .side_by_side import SideBySide

TINTS = ("black on bright_cyan", "black on bright_yellow")
"""Two styles in turn, readable on dark and light terminals and different on one of 16 colours."""
SEPARATOR = "▏"
"""Between steps where there are no colours."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""All usage errors. Newer typers bring their own copy of click, so that the class has no fixed name to import it by."""


class OneLineErrors(TyperGroup):
    """Usage errors, and input that the library refuses, end with one line on standard error and exit status 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Runs the command line; the library refuses input with ValueErrors whose text is made for the user."""
        standalone = extra.pop("standalone_mode", True)
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.Abort:
            status = 130
        except _UsageError as error:
            status = report(error.format_message())  # type: ignore[attr-defined]
        except (ValueError, OSError) as error:
            status = report(error)
        if standalone:
            sys.exit(status)
        return status


def report(error: object) -> int:
    """Prints an error as one line; returns the exit status."""
    print("error:", one_line(error), file=sys.stderr)
    return 2


def note(text: str) -> None:
    """Says on standard error what was chosen for the user."""
    Console(stderr=True).print(Text(f"note: {text}", style="dim"), soft_wrap=True)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object and nothing else."""
    print(json.dumps(value, ensure_ascii=False, indent=2))


@contextlib.contextmanager
def working(text: str, done: int = 0, total: int = 0) -> Iterator[None]:
    """A spinner on standard error, with a bar if there is a total, that leaves no trace; on a terminal only."""
    with advancing(text, total, done):
        yield


@contextlib.contextmanager
def advancing(text: str, total: int = 0, done: int = 0) -> Iterator[Callable[[int], None]]:
    """As `working`, with a bar that moves on when the function it gives is told how much more has been done."""
    with _bar(text, total, done) as (advance, _):
        yield advance


@contextlib.contextmanager
def reaching(text: str) -> Iterator[Callable[..., None]]:
    """As `advancing`; the function it gives is told how much has been done of how much and, if there is one, a loss."""
    with _bar(text, 1, 0) as (_, update):

        def reached(done: int, total: int, loss: float | None = None) -> None:
            update(completed=done, total=total, description=text if loss is None else f"{text}, loss {loss:.3f}")

        yield reached


@contextlib.contextmanager
def _bar(text: str, total: int, done: int) -> Iterator[tuple[Callable[[int], None], Callable[..., None]]]:
    if not sys.stderr.isatty():
        yield lambda more: None, lambda **change: None
        return
    from rich.progress import BarColumn, TimeElapsedColumn

    bar = [BarColumn()] if total else []
    progress = transient_progress(*bar, TimeElapsedColumn(), redirect_stderr=False, refresh_per_second=5)
    task = progress.add_task(text, total=total or None, completed=done)
    with progress:
        yield lambda more: progress.advance(task, more), lambda **change: progress.update(task, **change)


def transient_progress(*columns: ProgressColumn, **how: Any) -> Progress:
    """Progress on standard error that leaves no trace: a spinner, what is being done, and `columns`."""
    from rich.progress import Progress, SpinnerColumn, TextColumn

    what = SpinnerColumn(), TextColumn("{task.description}", markup=False)
    # Standard output is not redirected: it may be a file although standard error is a terminal.
    return Progress(*what, *columns, console=Console(stderr=True), transient=True, redirect_stdout=False, **how)


def percent(share: float) -> str:
    """A share from 0 to 1 as whole percent, or tenths where it is small."""
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def print_stats(console: Console, stats: Stats) -> None:
    """All statistics of a run."""
    console.print(stats.drafter, markup=False, highlight=False, soft_wrap=True)
    console.print(f"passes: {stats.path}", markup=False, highlight=False, soft_wrap=True)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row("mean accepted tokens (MAT)", f"{stats.mat:.2f}", "")
    table.add_row("tokens per second", f"{stats.tokens_per_second:.1f}", "")
    table.add_row("tokens", f"{stats.tokens:,}", "")
    table.add_row("steps", f"{stats.steps:,}", "")
    table.add_row("steps without a draft", f"{stats.nodes[1]:,}", percent(stats.plain_steps))
    table.add_row("drafted tokens", f"{stats.drafted:,}", "")
    table.add_row(
        "discarded tokens", f"{stats.discarded:,}", percent(stats.discarded / stats.drafted) if stats.drafted else ""
    )
    table.add_row(f"prompt, {stats.prompt_tokens:,} tokens", f"{stats.prefill_seconds:.3f} s", "")
    table.add_section()
    for part, seconds in stats.seconds.items():
        share_of_time = percent(seconds / stats.decode_seconds) if stats.decode_seconds else ""
        table.add_row(f"{part}, per step", f"{1000 * seconds / max(1, stats.steps):.3f} ms", share_of_time)
    for key, shares in (("depth", stats.acceptance_by_depth), ("rank", stats.acceptance_by_rank)):
        table.add_section()
        for place, share in shares.items():
            table.add_row(f"accepted at {key} {place}", "", percent(share))
    console.print(table)


def print_support(console: Console, found: Support) -> None:
    """Whether and how a model is supported, a line for each thing known."""
    lines = [
        ("model", f"{found.model}, family {found.family}"),
        ("supported", "yes" if found.supported else "no"),
        ("because" if found.reason else "how", found.reason or found.how),
    ]
    if found.supported:
        lines.append(("attention", found.attention))
        lines.append(("tested family", "yes" if found.tested else "no"))
        lines.append(("fast path", f"no: {found.no_fast_path}" if found.no_fast_path else "yes, on CUDA"))
    if found.difference is not None:
        lines.append(("self-test", f"logits differ by {found.difference:.1e} at most"))
    lines += [("note", note) for note in found.notes]
    for name, text in lines:
        console.print(f"{name:14}{text}", markup=False, highlight=False, soft_wrap=True)


def has_colours(console: Console) -> bool:
    """True if tints can be seen."""
    return console.color_system is not None and not console.no_color


def by_step(pieces: Sequence[str], colours: bool) -> Text:
    """A text whose steps can be told apart: in two tints in turn, or with a thin separator between."""
    if not colours:
        return Text(SEPARATOR.join(pieces))
    return Text.assemble(*((piece, TINTS[step % len(TINTS)]) for step, piece in enumerate(pieces)))


def tail(text: str, lines: int = 8) -> str:
    """The last lines of a text."""
    kept = text.split("\n")
    return text if len(kept) <= lines else "\n".join(["…", *kept[-lines:]])


def print_comparison(console: Console, place: str, found: SideBySide, pieces: Sequence[str]) -> None:
    """One prompt: its end, the text that followed by steps, and what the two runs took."""
    console.rule(Text(f"{place}: {found.name}"), align="left", characters="─", style="dim")
    colours = has_colours(console)
    shown = tail(found.prompt)
    start = (shown, "dim") if colours else f"{shown}{SEPARATOR}"
    console.print(Text.assemble(start, by_step(pieces, colours)), soft_wrap=True)
    console.print()
    if found.divergence is not None:
        console.print(f"differs: {found.divergence}", markup=False, soft_wrap=True)
    took = found.speeds
    console.print(
        f"identical: {_yes(found.identical)}, plain {took['plain']['tokens_per_second']:.1f} tokens/s, "
        f"recycled {took['recycled']['tokens_per_second']:.1f} tokens/s, speedup {took['speedup']:.2f}, "
        f"MAT {found.stats.mat:.2f} ({found.stats.tokens} tokens in {found.stats.steps} steps)\n",
        highlight=False,
        soft_wrap=True,
    )


def print_summary(console: Console, summary: dict[str, Any]) -> None:
    """The end of a comparison."""
    console.rule(Text(f"prompts: {summary['prompts']}"), align="left", characters="─", style="dim")
    lines = (
        ("drafter", summary["drafter"]),
        ("plain", f"{summary['plain']['tokens_per_second']:.1f} tokens/s (transformers' own generate)"),
        ("recycled", f"{summary['recycled']['tokens_per_second']:.1f} tokens/s"),
        ("speedup", f"{summary['speedup']:.2f}"),
        ("MAT", f"{summary['mat']:.2f}"),
    )
    for name, value in lines:
        console.print(f"{name + ':':<10} {value}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"identical: {_yes(summary['identical'])}", style="bold", highlight=False)


def legend(console: Console, drafter: str) -> None:
    """How to read the texts that follow."""
    how = "the two tints take turns" if has_colours(console) else f"a {SEPARATOR} stands before each"
    console.print(
        f"tokens of one step came together; {how} ({drafter})\n",
        style="dim",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def print_matrix(console: Console, held: dict[str, Any]) -> None:
    """A saved matrix: the header, then rows: a token and what the model would say after it."""
    share = percent(held["rows_filled"] / held["vocab_size"])
    console.print(
        f"{held['file']}: adjacency matrix, format version {held['format_version']}\n"
        f"{held['vocab_size']:,} tokens x {held['k']} candidates, {held['bytes']:,} bytes\n"
        f"tokenizer: {held['tokenizer'] or 'not stated'}\n"
        f"rows filled: {held['rows_filled']:,} ({share})",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    if not held["rows"]:
        return
    table = Table("after", "candidates, best first")
    for row in held["rows"]:
        shown = [_token(token, text) for token, text in zip(row["candidates"], row["candidate_texts"], strict=True)]
        table.add_row(Text(_token(row["token"], row["text"])), Text("  ".join(shown)))
    console.print(table)


def print_drafters(console: Console, drafters: Iterable[dict[str, Any]]) -> None:
    """Every drafter with a table of its options."""
    for drafter in drafters:
        console.print(Text.assemble((drafter["name"], "bold"), f"  {drafter['summary']}"), soft_wrap=True)
        if drafter["options"]:
            table = Table("option", "type", "default", "what it does")
            for option in drafter["options"]:
                table.add_row(*(Text(option[column]) for column in ("name", "type", "default", "summary")))
            console.print(table)


def _token(token: int, text: str | None) -> str:
    return str(token) if text is None else f"{token} {text!r}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
