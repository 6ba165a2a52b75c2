"""Terminal output: one-line errors, progress, and statistics and steps as rich text.

Results go to standard output, notes and progress to standard error.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from .._util.text_stream import one_line

if TYPE_CHECKING:
    import torch
    from rich.progress import Progress, ProgressColumn, TaskID

    from ..loop.stats import Stats

TINTS = ("black on bright_cyan", "black on bright_yellow")
"""Two alternating styles, readable on dark and light terminals and distinct among 16 colors."""
SEPARATOR = "▏"
"""Separates steps on terminals without colors."""

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Base class of all usage errors. Newer typers bundle their own copy of click, so its import path is not fixed."""


class OneLineErrors(TyperGroup):
    """Report usage errors and refused input as one line on standard error, with exit status 2."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run the command line. The library refuses input with ValueErrors whose messages are written for users."""
        try:
            status = super().main(*args, **{**extra, "standalone_mode": False})
        except typer.Abort:
            status = 130
        except _UsageError as error:
            status = report(error.format_message())  # type: ignore[attr-defined]
        except (ValueError, OSError) as error:
            status = report(error)
        sys.exit(status)


class OneDrafter(TyperCommand):
    """A command that refuses a second --drafter; click would silently use the last one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; raises a usage error."""
        _, _, options = self.make_parser(ctx).parse_args(list(args))
        times = [option.name for option in options].count("drafter")
        if times > 1:
            ctx.fail(
                f"--drafter was given {times} times; give one, such as --drafter fuse:recycling+suffix to combine two"
            )
        return super().parse_args(ctx, args)


def group(help: str) -> typer.Typer:
    """Return a command with subcommands, which prints its help if none is given."""

    def main(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            print(context.get_help())

    return typer.Typer(help=help, callback=main, invoke_without_command=True)


def report(error: object) -> int:
    """Print an error as one line and return the exit status."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        error = f"{error.filename}: {error.strerror}"
    print("error:", one_line(error), file=sys.stderr)
    return 2


def say(console: Console, text: str, style: str = "") -> None:
    """Print text verbatim: no markup, no highlighted numbers, no wrapping."""
    console.print(Text(text, style), soft_wrap=True)


def note(text: str) -> None:
    """Print a note on standard error, such as an automatic choice."""
    say(Console(stderr=True), f"note: {text}", "dim")


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(value, ensure_ascii=False, indent=2))


@contextlib.contextmanager
def working(text: str, total: int = 0, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show a spinner on standard error, with a bar if there is a total; on terminals only. Yields a function that
    advances the bar by an amount.
    """
    with progress_bar(text, total, done, redirect_stderr=False) as (progress, task):
        yield lambda more: progress.advance(task, more)


@contextlib.contextmanager
def reaching(text: str) -> Iterator[Callable[..., None]]:
    """Show progress as `working` does; yields a function of the amount done, the total and optionally a loss."""
    with progress_bar(text, 1, redirect_stderr=False) as (progress, task):

        def reached(done: int, total: int, loss: float | None = None) -> None:
            shown = text if loss is None else f"{text}, loss {loss:.3f}"
            progress.update(task, completed=done, total=total, description=shown)

        yield reached


@contextlib.contextmanager
def progress_bar(
    text: str, total: int, done: int = 0, *columns: ProgressColumn, **how: Any
) -> Iterator[tuple[Progress, TaskID]]:
    """Show transient progress on standard error, on terminals only: a spinner, a description, and `columns`, by default
    a bar if there is a total, and the time.
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    usual = [BarColumn(), TimeElapsedColumn()] if total else [TimeElapsedColumn()]
    what = SpinnerColumn(), TextColumn("{task.description}", markup=False), *(columns or usual)
    # Do not redirect standard output: it may be a file while standard error is a terminal.
    progress = Progress(
        *what, console=Console(stderr=True), transient=True, redirect_stdout=False, refresh_per_second=5, **how
    )
    task = progress.add_task(text, total=total or None, completed=done)
    with progress if sys.stderr.isatty() else contextlib.nullcontext():
        yield progress, task


def percent(share: float) -> str:
    """Format a fraction from 0 to 1 in whole percent, or with one decimal below 10%."""
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def print_stats(console: Console, stats: Stats, device: torch.device) -> None:
    """Print the statistics of a run."""
    where = "on the CPU, not on a GPU" if device.type == "cpu" else f"on {device}"
    say(console, f"{stats.drafter}\ncomputed {where}; passes: {stats.path}")
    table = Table(Column(), Column(justify="right"), Column(justify="right"), show_header=False)
    table.add_row("mean accepted tokens (MAT)", f"{stats.mat:.2f}")
    table.add_row("tokens per second", f"{stats.tokens_per_second:.1f}")
    table.add_row("tokens", f"{stats.tokens:,}")
    table.add_row("steps", f"{stats.steps:,}")
    table.add_row("steps without a draft", f"{stats.nodes[1]:,}", percent(stats.plain_steps))
    table.add_row("drafted tokens", f"{stats.drafted:,}")
    discarded = percent(stats.discarded / stats.drafted) if stats.drafted else ""
    table.add_row("discarded tokens", f"{stats.discarded:,}", discarded)
    table.add_row(f"prompt, {stats.prompt_tokens:,} tokens", f"{stats.prefill_seconds:.3f} s")
    if stats.cached_tokens:
        table.add_row("prompt tokens in the cache", f"{stats.cached_tokens:,}")
    table.add_section()
    for part, seconds in stats.seconds.items():
        share = percent(seconds / stats.decode_seconds) if stats.decode_seconds else ""
        table.add_row(f"{part}, per step", f"{1000 * seconds / max(1, stats.steps):.3f} ms", share)
    for key, accepted in (("depth", stats.acceptance_by_depth), ("rank", stats.acceptance_by_rank)):
        table.add_section()
        for place, chance in accepted.items():
            if place <= 8 or place.bit_count() == 1:  # beyond 8 only 16, 32, 64, ...: deep trees would fill the screen
                table.add_row(f"accepted at {key} {place}", "", percent(chance))
    console.print(table)


def has_colors(console: Console) -> bool:
    """Return whether tints are visible."""
    return console.color_system is not None and not console.no_color


def by_step(pieces: Sequence[str], colors: bool) -> Text:
    """Return text with visible steps: alternating tints, or a thin separator between steps."""
    if not colors:
        return Text(SEPARATOR.join(pieces))
    return Text.assemble(*((piece, TINTS[step % len(TINTS)]) for step, piece in enumerate(pieces)))
