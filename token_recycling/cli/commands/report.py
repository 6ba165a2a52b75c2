"""`token-recycling report`: what a benchmark measured, as tables, plots and a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .. import console
from ..options import Json


def report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `bench` wrote, with rows.jsonl.")],
    baseline: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="What speedups refer to; default generate, or plain if that is missing."),
    ] = None,
    clock: Annotated[
        Literal["wall", "processor"],
        typer.Option(help="Measure by elapsed or by processor time: fair with one thread on a busy machine."),
    ] = "wall",
    elsewhere: Annotated[
        bool, typer.Option("--elsewhere", help="Add speedups reckoned for an A100, an RTX 3090 and a CPU.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Shows what a benchmark measured, and writes report.md, report.html and plots/ into its folder.

    With --json it prints every figure and writes nothing.
    """
    from ...bench.report import require_extra

    require_extra()
    from ...bench.report import write as reporting
    from ...bench.report.summary import read

    if as_json:
        console.print_json(reporting.as_dict(read(folder, baseline, clock), elsewhere))
        return
    with_tables = Console()
    files = reporting.write(folder, with_tables, baseline, clock, elsewhere)
    plots = sum(file.parent.name == "plots" for file in files)
    named = ", ".join(str(file) for file in files if file.parent.name != "plots")
    with_tables.print(f"wrote {named} and {plots} plots", markup=False, highlight=False, soft_wrap=True)
