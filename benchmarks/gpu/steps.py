"""Step times of Llama shapes with random weights, compared with `generate`: `python -m benchmarks.gpu.steps`.

No download is needed. For every shape and context length the program measures a token of transformers' own `generate`,
eager and compiled with a static cache; eager, captured, and captured and compiled steps of 1 to 256 nodes; the forward
pass of a step alone; and the device's busy and waiting time in each. Then it writes a table with the goals.

Every measurement is written immediately as a row of `rows.jsonl`. A run that is interrupted, or reaches its time limit
(`--seconds`), resumes when it is started again; rows of another machine or commit are measured again. A shape that does
not fit into memory ends the program with the error; earlier rows are kept.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console

from token_recycling.model.target import Target

from .measurements import EVERYTHING, FEW, Measurement, Wanted, measurements
from .report import write_report
from .rows import Row, Rows, opened
from .shapes import SHAPES, made

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """A run of this program."""

    rows: Rows
    contexts: list[int]
    device: torch.device
    dtype: torch.dtype
    until: float
    wanted: Wanted
    say: Console

    def measure(self, shape: str) -> bool:
        """Run the missing measurements of a shape; return False if the time ran out first."""
        wanted = [one for context in self.contexts for one in measurements(shape, context, self.wanted)]
        missing = [(key, run) for key, run in wanted if not self.rows.has(**key)]
        if not missing:
            return True
        if time.monotonic() > self.until:
            return False
        self.say.print(f"{shape}: {len(missing)} measurements to do", highlight=False)
        longest = max(self.contexts) + 2 * self.wanted.sizes[-1]
        target = Target(made(shape, longest, self.device, self.dtype))
        for key, run in missing:
            if time.monotonic() > self.until:
                return False
            found = self._measured(target, key["context"], run)
            self.rows.add({**key, **found})
            short = {name: value for name, value in {**key, **found}.items() if name != "longest"}
            self.say.print(*short.values(), highlight=False)
        return True

    def _measured(self, target: Target, context: int, run: Measurement) -> Row:
        """Run one measurement; an error becomes its row and does not stop the others."""
        try:
            return run(target, context)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def main(
    shape: Annotated[list[str] | None, typer.Option(help="8B, 3B, 1B, 7B or tiny; repeatable")] = None,
    context: Annotated[list[int] | None, typer.Option(help="tokens of context; repeatable")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to test the program")] = "cuda",
    dtype: Annotated[str, typer.Option(help="data type of the weights")] = "bfloat16",
    seconds: Annotated[
        float, typer.Option(help="start no measurement after this many seconds; a later run resumes")
    ] = 480,
    few: Annotated[bool, typer.Option("--few", help="few sizes and no compiler, to test the program")] = False,
    output: Annotated[Path, typer.Option(help="folder for rows.jsonl and report.md")] = ROOT
    / "docs"
    / "results"
    / "gpu",
) -> None:
    """Run the missing measurements, and write the report. Exit status 3 if some are left."""
    until, say = time.monotonic() + seconds, Console(stderr=True, width=120)
    shapes, contexts = shape or ["8B", "3B", "1B", "7B"], sorted(context or [512, 2048, 8192])
    unknown = sorted({*shapes} - {*SHAPES})
    if unknown:
        raise typer.BadParameter(f"unknown shape {', '.join(unknown)}; choose from {', '.join(SHAPES)}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"no CUDA device found for --device {device}; test with --device cpu --shape tiny")
    transformers.utils.logging.set_verbosity_error()
    rows, where = opened(output, torch.device(device), getattr(torch, dtype))
    job = Job(rows, contexts, torch.device(device), getattr(torch, dtype), until, FEW if few else EVERYTHING, say)
    done = all(list(map(job.measure, shapes)))
    command = "python -m benchmarks.gpu.steps " + " ".join(sys.argv[1:])
    write_report(output, rows, where, command.strip())
    say.print(f"{output / 'report.md'}: " + ("all measured" if done else "some measurements are left; run it again"))
    if not done:
        raise typer.Exit(3)


if __name__ == "__main__":
    typer.run(main)
