"""Measures the default drafter: `python -m benchmarks.default --output docs/results/default`.

Every scenario gets its share of the time; what one leaves goes to those after it. A folder with rows is gone on with.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

from .report import markdown
from .run import run
from .scenarios import SCENARIOS


def main(
    output: Annotated[Path, typer.Option(help="folder of the rows and of table.md; gone on with")],
    data: Annotated[
        list[str] | None, typer.Option(help="NAME=FILE: questions in place of the demo's; known answers are replayed")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="a workload by name; may be given again")] = None,
    prompts: Annotated[int | None, typer.Option(help="prompts of a workload at most")] = None,
    minutes: Annotated[float, typer.Option(help="ends after this time")] = 60.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="deletes rows of the workloads that are measured")] = False,
    report: Annotated[bool, typer.Option("--report", help="measures nothing, reports on the folder")] = False,
) -> None:
    """Measures what is missing, and writes and prints the report."""
    names = [scenario.name for scenario in SCENARIOS]
    unknown = [name for name in only or [] if name not in names]
    if unknown:
        raise typer.BadParameter(f"expected --only with one of {', '.join(names)}, got {unknown[0]!r}")
    chosen = [scenario for scenario in SCENARIOS if not only or scenario.name in only]
    if not data:
        chosen = [scenario for scenario in chosen if not scenario.from_file]
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    end = time.monotonic() + 60 * minutes
    for place, scenario in enumerate([] if report else chosen):
        now = time.monotonic()
        share = scenario.share / sum(one.share for one in chosen[place:])
        try:
            measured = run(scenario, output / scenario.name, data or (), prompts, now + share * (end - now), fresh)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        typer.echo(f"{scenario.name}: {measured} prompts, {time.monotonic() - now:.0f} s", err=True)
    text = markdown(output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "table.md").write_text(text, encoding="utf-8")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(main)
