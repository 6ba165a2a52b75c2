"""Runs the random campaign: `python -m benchmarks.campaign --minutes 10 --out FOLDER`.

Cases are numbered; a case is the same on every machine. A folder with rows in it is gone on with, and so a campaign may
be stopped at any time.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Annotated

import typer

from .report import markdown, read
from .run import FAILURES
from .worker import work


def main(
    out: Annotated[Path, typer.Option(help="folder of the rows and of scripts of failures; gone on with")],
    minutes: Annotated[float, typer.Option(help="ends after this time")] = 10.0,
    seed: Annotated[int, typer.Option(help="another seed has other cases")] = 0,
    cases: Annotated[int | None, typer.Option(help="ends before the case of this number")] = None,
    first: Annotated[int, typer.Option(help="number of the first case")] = 0,
    jobs: Annotated[int, typer.Option(help="processes")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="DIMENSION=VALUE: cases that have it, such as surface=stream")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="runs nothing, reports on the folder")] = False,
    markdown_file: Annotated[Path | None, typer.Option("--markdown", help="writes the report there too")] = None,
) -> None:
    """Runs cases and prints the report; exit status 1 if any case failed."""
    file = out / "rows.jsonl"
    if not report:
        (out / "scripts").mkdir(parents=True, exist_ok=True)
        wanted = [tuple(pair.split("=", 1)) for pair in only or []]
        arguments = (out, seed, first, cases, time.time() + 60 * minutes, jobs, wanted)
        spawn = multiprocessing.get_context("spawn")
        workers = [spawn.Process(target=work, args=(job, *arguments)) for job in range(jobs)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise typer.Exit(2)
    rows = read(file)
    text = markdown(rows)
    print(text)
    if markdown_file is not None:
        markdown_file.write_text(text, encoding="utf-8")
    raise typer.Exit(int(any(row["outcome"] in FAILURES for row in rows)))


if __name__ == "__main__":
    typer.run(main)
