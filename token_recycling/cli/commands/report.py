"""`token-recycling report`: print and write the results of a benchmark, as Markdown with plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ...bench import require_extra
from .. import console
from ..options import Json


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A folder that `bench` wrote, with rows.jsonl, or of such.")
    ],
    baseline: Annotated[
        str | None,
        typer.Option(metavar="METHOD", help="What speedups refer to; default generate, or plain if that is missing."),
    ] = None,
    clock: Annotated[
        Literal["wall", "processor"],
        typer.Option(help="Measure by elapsed or by processor time: fair with one thread on a busy machine."),
    ] = "wall",
    as_json: Json = False,
) -> None:
    """Show the results of a benchmark, and write report.md and plots/ into its folder.

    With --json it prints every figure and writes nothing.
    """
    require_extra()
    from ...bench.report import as_dict, write
    from ...bench.summary import read

    if as_json:
        console.print_json(as_dict(read(folder, baseline, clock)))
        return
    text, files = write(folder, baseline, clock)
    print(text)
    console.note(f"wrote {files[0]} and {len(files) - 1} plots")
